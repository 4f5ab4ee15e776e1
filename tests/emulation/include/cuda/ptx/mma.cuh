// For src/cuda/ptx/mma.cuh, which describes how lanes share matrices. Sums are fp32, term by term.
#pragma once

#include <cuda_fp16.h>

#include "cuda/ptx/async_copy.cuh"

namespace replayssm::cuda::ptx {

/// kTerms: terms of a sum; term(word, i) is number i of the numbers in a lane's word.
template <int kTerms, typename Term>
void multiply(float (&sums)[4], const std::uint32_t (&operands)[6], Term term) {
  constexpr int kPerWord = kTerms / 8;
  emulation::Gift gift{};
  std::copy(std::begin(operands), std::end(operands), gift.word);
  const emulation::Gift* gifts = emulation::meet(emulation::Meeting::kMatrices, gift);
  const int g = emulation::current().lane / 4;
  const int q = emulation::current().lane % 4;
  for (int i = 0; i < 4; ++i) {
    const int column = 2 * q + i % 2;
    for (int k = 0; k < kTerms; ++k) {
      const int half = k / (kTerms / 2);
      const int lane = k % (kTerms / 2) / kPerWord;
      const int number = k % kPerWord;
      sums[i] += term(gifts[4 * g + lane].word[2 * half + i / 2], number) *
                 term(gifts[4 * column + lane].word[4 + half], number);
    }
  }
}

inline void mma_f16(float (&sums)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                    std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
  multiply<16>(sums, {a0, a1, a2, a3, b0, b1}, [](std::uint32_t word, int i) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(word >> (16 * i))));
  });
}
inline void mma_bf16(float (&sums)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                     std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
  multiply<16>(sums, {a0, a1, a2, a3, b0, b1}, [](std::uint32_t word, int i) {
    return __uint_as_float(i == 0 ? word << 16 : word & 0xffff0000u);
  });
}
inline void mma_tf32(float (&sums)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                     std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
  multiply<8>(sums, {a0, a1, a2, a3, b0, b1},
              [](std::uint32_t word, int) { return __uint_as_float(word & 0xffffe000u); });
}

inline void load_matrices_transposed(std::uint32_t (&out)[4], const void* shared) {
  if (reinterpret_cast<std::uintptr_t>(shared) % 16 != 0) emulation::fail("a misaligned matrix");
  emulation::Gift gift{};
  gift.pointer = shared;
  const emulation::Gift* gifts = emulation::meet(emulation::Meeting::kLoadMatrices, gift);
  const int lane = emulation::current().lane;
  for (int matrix = 0; matrix < 4; ++matrix) {
    const auto at = [&](int row) {
      const auto* from = static_cast<const std::uint16_t*>(gifts[8 * matrix + row].pointer);
      return std::uint32_t{from[lane / 4]};
    };
    out[matrix] = at(2 * (lane % 4)) | at(2 * (lane % 4) + 1) << 16;
  }
}

}  // namespace replayssm::cuda::ptx
