"""The functions of NVIDIA's libraries on CPU tensors, under their own signatures, conventions and limits."""
