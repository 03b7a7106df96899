"""What a run shows and writes while it trains: progress display, metrics, log lines, bytes sent."""
