"""What stepwell reaches, beside what the disk and other libraries reach on the same machine in the same minutes."""
