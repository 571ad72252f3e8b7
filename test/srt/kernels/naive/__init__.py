"""What each operation of kernels/ is: loops of a few lines, short and slow, which all forms are
compared with."""
