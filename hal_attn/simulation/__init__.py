"""A vendor's platform without its hardware: the real adapters over the vendor's functions, computed on the CPU."""
