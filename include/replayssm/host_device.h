// RSSM_HOST_DEVICE: a function that CUDA kernels call as well as the host.
#pragma once

#if defined(__CUDACC__)
#define RSSM_HOST_DEVICE __host__ __device__
#else
#define RSSM_HOST_DEVICE
#endif
