// Device memory for tests. CUDA calls that fail end the test.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <utility>
#include <vector>

namespace replayssm::cuda {

#define ASSERT_CUDA(expr)                                                          \
  do {                                                                             \
    const cudaError_t error_ = (expr);                                             \
    ASSERT_EQ(error_, cudaSuccess) << #expr << ": " << cudaGetErrorString(error_); \
  } while (false)

inline void require(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    ADD_FAILURE() << what << ": " << cudaGetErrorString(error);
    throw std::runtime_error(what);
  }
}

class DeviceBytes {
 public:
  DeviceBytes() = default;
  explicit DeviceBytes(std::size_t bytes) : bytes_(bytes) {
    require(cudaMalloc(&data_, std::max<std::size_t>(bytes, 16)), "cudaMalloc");
  }
  DeviceBytes(DeviceBytes&& other) noexcept { *this = std::move(other); }
  DeviceBytes& operator=(DeviceBytes&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~DeviceBytes() { cudaFree(data_); }

  void fill(int byte) { require(cudaMemset(data_, byte, bytes_), "cudaMemset"); }
  void upload(const void* from, std::size_t bytes) {
    ASSERT_LE(bytes, bytes_);
    require(cudaMemcpy(data_, from, bytes, cudaMemcpyHostToDevice), "upload");
  }
  std::vector<unsigned char> download() const {
    std::vector<unsigned char> out(bytes_);
    require(cudaMemcpy(out.data(), data_, bytes_, cudaMemcpyDeviceToHost), "download");
    return out;
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  std::size_t size() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// Cases of a class derived from this are skipped where there is no GPU.
class OnCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
      cudaGetLastError();
      GTEST_SKIP() << "no CUDA device";
    }
  }
};

}  // namespace replayssm::cuda
