"""What goes wrong in attention code in production, one small input a fault, on every backend that takes it."""
