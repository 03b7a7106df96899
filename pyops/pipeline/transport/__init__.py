"""What goes from rank to rank: messages, channels, shared-memory mailboxes, and how an interrupt is
held back."""
