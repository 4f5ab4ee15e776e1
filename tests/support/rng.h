// Deterministic random numbers: the same on every platform and standard library.
#pragma once

#include <cstdint>

namespace replayssm::testing {

/// SplitMix64's finalizer: mixes a key into 64 random bits.
constexpr std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

class Rng {
 public:
  explicit Rng(std::uint64_t seed) : state_(mix(seed + 0x9e3779b97f4a7c15ull)) {}

  std::uint64_t next() { return mix(state_ += 0x9e3779b97f4a7c15ull); }

  /// Uniform in [0, n).
  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(n));
  }
  /// Uniform in [first, last].
  std::int64_t between(std::int64_t first, std::int64_t last) {
    return first + below(last - first + 1);
  }
  bool chance(double p) { return static_cast<double>(next() >> 11) * 0x1p-53 < p; }

  float uniform(float lo, float hi) {
    return lo + (hi - lo) * (static_cast<float>(next() >> 40) * 0x1p-24f);
  }
  /// Close to a standard normal: the sum of four uniforms.
  float normal() {
    const std::uint64_t bits = next();
    float sum = 0.0f;
    for (int i = 0; i < 4; ++i) {
      sum += static_cast<float>((bits >> (16 * i)) & 0xffffu) * 0x1p-16f - 0.5f;
    }
    return sum * 1.7320508f;
  }

 private:
  std::uint64_t state_;
};

}  // namespace replayssm::testing
