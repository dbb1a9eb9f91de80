"""What touches devices: compiling segments, profiling kernels, executing programs."""
