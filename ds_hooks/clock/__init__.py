"""When a bubble begins and ends: by the host's clock on a CPU, by events in the stream on CUDA."""
