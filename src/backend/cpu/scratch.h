// Scratch memory of the CPU backend: one buffer per worker, grown on demand and never shrunk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace replayssm::cpu {

class Scratch {
 public:
  explicit Scratch(int workers) : buffers_(static_cast<std::size_t>(workers)) {}
  ~Scratch() {
    for (const Buffer& buffer : buffers_) release(buffer);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  /// Makes room for `floats` per worker; called outside of parallel_for. False if out of memory.
  [[nodiscard]] bool reserve(std::int64_t floats) {
    for (Buffer& buffer : buffers_) {
      if (buffer.floats >= floats) continue;
      release(buffer);
      buffer = {};
      void* p = ::operator new(static_cast<std::size_t>(floats) * sizeof(float), kAlignment,
                               std::nothrow);
      if (p == nullptr) return false;
      buffer = {static_cast<float*>(p), floats};
    }
    return true;
  }

  float* get(int worker) const { return buffers_[static_cast<std::size_t>(worker)].data; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Buffer {
    float* data = nullptr;
    std::int64_t floats = 0;
  };

  static void release(const Buffer& buffer) { ::operator delete(buffer.data, kAlignment); }

  std::vector<Buffer> buffers_;
};

}  // namespace replayssm::cpu
