"""Which rank holds which layers and takes which samples, its process groups, and the way to the
next layout."""
