"""How many layers are frozen: gradient norms by layer, and the policies that decide by them."""
