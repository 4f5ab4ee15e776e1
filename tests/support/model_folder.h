// Model folders made for a test: another one's files with the configuration or weights changed.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "io/checkpoint.h"
#include "support/temp_dir.h"

namespace replayssm::testing {

using Json = nlohmann::json;

struct StoredTensor {
  std::string name;
  std::string dtype;  // as safetensors spells it
  std::vector<std::int64_t> shape;
  std::string bytes;

  /// Of an F32 tensor.
  float at(std::size_t index) const {
    float value = 0;
    std::memcpy(&value, bytes.data() + index * sizeof value, sizeof value);
    return value;
  }
  void set(std::size_t index, float value) {
    ASSERT_EQ(dtype, "F32") << name;
    std::memcpy(bytes.data() + index * sizeof value, &value, sizeof value);
  }
  std::size_t count() const { return bytes.size() / sizeof(float); }
};

using StoredTensors = std::vector<StoredTensor>;

inline StoredTensors read_tensors(const std::string& folder) {
  StoredTensors out;
  const auto checkpoint = Checkpoint::open(folder);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  if (!checkpoint.ok()) return out;
  for (const TensorInfo& tensor : checkpoint->tensors()) {
    out.push_back(
        {tensor.name, tensor.dtype_name, tensor.shape,
         std::string(reinterpret_cast<const char*>(tensor.data.data()), tensor.data.size())});
  }
  return out;
}

inline void write_tensors(const TempDir& folder, const StoredTensors& tensors) {
  Json header = Json::object();
  std::string data;
  for (const StoredTensor& tensor : tensors) {
    const std::size_t end = data.size() + tensor.bytes.size();
    header[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {data.size(), end}}};
    data += tensor.bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const std::uint64_t length = text.size();
  std::string file(reinterpret_cast<const char*>(&length), sizeof length);
  folder.write("model.safetensors", file + text + data);
}

inline StoredTensor& tensor_named(StoredTensors& tensors, const std::string& name) {
  for (StoredTensor& tensor : tensors) {
    if (tensor.name == name) return tensor;
  }
  ADD_FAILURE() << "no tensor " << name;
  return tensors.front();
}

inline Json read_config(const std::string& folder) {
  return Json::parse(read_text(folder + "/config.json"));
}

/// Links to every file of `source`.
inline void link_files(const TempDir& folder, const std::string& source) {
  for (const auto& entry : std::filesystem::directory_iterator(source)) {
    std::filesystem::create_symlink(std::filesystem::absolute(entry.path()),
                                    folder / entry.path().filename().string());
  }
}

/// Replaces a linked or real file of the folder by one with these contents.
inline void replace_file(const TempDir& folder, const std::string& name,
                         const std::string& contents) {
  std::filesystem::remove(folder / name);
  folder.write(name, contents);
}

inline void replace_tensors(const TempDir& folder, const StoredTensors& tensors) {
  std::vector<std::filesystem::path> old;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    if (entry.path().filename().string().find(".safetensors") != std::string::npos) {
      old.push_back(entry.path());
    }
  }
  for (const auto& path : old) std::filesystem::remove(path);
  write_tensors(folder, tensors);
}

}  // namespace replayssm::testing
