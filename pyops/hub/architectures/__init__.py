"""The architectures of Hugging Face folders that pyops loads: for each, config.json and tensor
names as a table."""
