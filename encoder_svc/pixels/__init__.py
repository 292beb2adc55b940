"""From the bytes of a file to the patches a tower reads: numpy, Pillow and PyAV, no torch."""
