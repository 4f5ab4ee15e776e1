// Matrix products of one warp on the tensor cores, sm_80 and later.
//
// With g = lane / 4 and q = lane % 4, a lane of m16n8kK holds rows g and g + 8 of A and of the
// sums, column g of B and columns 2q and 2q + 1 of the sums:
//   sums  {(g, 2q), (g, 2q+1), (g+8, 2q), (g+8, 2q+1)}
//   k16   A {(g, 2q..), (g+8, 2q..), (g, 2q+8..), (g+8, 2q+8..)}, B {(2q.., g), (2q+8.., g)}, two
//         bf16 to a word
//   k8    A {(g, q), (g+8, q), (g, q+4), (g+8, q+4)}, B {(q, g), (q+4, g)}, tf32
// Which element of the contracted axis is called k is free as long as A and B agree, so a lane may
// load neighbours in memory and use them as its k's.
#pragma once

#include <cstdint>

#include "cuda/ptx/async_copy.cuh"

namespace replayssm::cuda::ptx {

/// sums += A B, bf16 products, fp32 sums.
__device__ __forceinline__ void mma_bf16(float (&sums)[4], std::uint32_t a0, std::uint32_t a1,
                                         std::uint32_t a2, std::uint32_t a3, std::uint32_t b0,
                                         std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// sums += A B, f16 products, fp32 sums; layouts are those of bf16.
__device__ __forceinline__ void mma_f16(float (&sums)[4], std::uint32_t a0, std::uint32_t a1,
                                        std::uint32_t a2, std::uint32_t a3, std::uint32_t b0,
                                        std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// sums += A B, tf32 products (the low 13 bits of an operand are ignored), fp32 sums.
__device__ __forceinline__ void mma_tf32(float (&sums)[4], std::uint32_t a0, std::uint32_t a1,
                                         std::uint32_t a2, std::uint32_t a3, std::uint32_t b0,
                                         std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// Four 8x8 matrices of 16-bit elements, transposed on the way; lane i names row i % 8 of matrix
/// i / 8.
__device__ __forceinline__ void load_matrices_transposed(std::uint32_t (&out)[4],
                                                         const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(shared))
               : "memory");
}

}  // namespace replayssm::cuda::ptx
