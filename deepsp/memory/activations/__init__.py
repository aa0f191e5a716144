"""What backward finds of a forward pass: kept, computed again, or fetched from the host."""
