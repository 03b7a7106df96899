"""What lies on the disk: safetensors files with checksums, the manifest, and how parts of tensors
are named."""
