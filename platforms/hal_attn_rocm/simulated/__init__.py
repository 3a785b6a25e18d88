"""AMD's attention functions on the CPU, under their own signatures, conventions, limits and faults."""
