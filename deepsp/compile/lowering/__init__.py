"""The ops as Inductor sees them, and in which order it keeps them."""
