"""The architectures of Hugging Face folders that pyops knows: for each, config.json and tensor
names as a table."""
