/* A CUDA runtime and driver without a device, loaded before torch's CUDA build.

   Memory is host memory, copies are immediate, kernels do not run. The host side of every CUDA operator runs as it is:
   checks of types, layouts, alignment and capability, the choice of kernels, allocation, streams, events, graphs.
   tests/cuda/build.py writes a function that returns 0 for everything else that torch needs of the CUDA libraries. */
#ifndef RUNTIME_H
#define RUNTIME_H
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Tells the listener, if there is one, that the host waits for the device, or that a graph is launched. */
void tell(const char *what, long which);
/* Keeps an error for cudaGetLastError, as kernel launches do, and returns it. */
cudaError_t failed(cudaError_t error);
/* A new handle of a stream, an event or whatever else is opaque. */
void *new_handle(void);
/* Compute capability of a device, times ten: RUNTIME_CAPABILITIES lists one per device ("9.0,10.0"). */
int capability(int device);
int num_devices(void);
int runtime_trace(const char *name);
#endif
