// Vec<Isa>: a vector of floats for one instruction set, so that a kernel is written once and
// compiled in one translation unit per instruction set (kernel_generic.cc, kernel_avx2.cc, ...).
//
// Everything here has internal linkage per Isa type: a function compiled with AVX-512 flags must
// never be the copy the linker keeps for baseline code. Kernel templates take Isa as a parameter
// for the same reason.
#pragma once

#include "cpu/simd/vec_generic.h"
#if defined(__AVX2__)
// GCC reports the deliberately undefined operands of its own intrinsics as uninitialized.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "cpu/simd/vec_avx2.h"
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "cpu/simd/vec_avx512.h"
#endif
