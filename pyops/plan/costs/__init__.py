"""What a layout costs: bytes of a rank, seconds of a step, messages, the turns of a pipeline."""
