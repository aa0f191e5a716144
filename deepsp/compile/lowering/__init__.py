"""deepsp's ops as Inductor sees them, and the order in which it keeps them."""
