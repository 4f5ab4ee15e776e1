// libFuzzer target: parse_safetensors refuses a file, or gives tensors that lie in it and cover its
// data section exactly.
#include <cstddef>
#include <cstdint>
#include <span>

#include "io/safetensors.h"

namespace {

void require(bool condition) {
  if (!condition) __builtin_trap();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::byte> file = std::as_bytes(std::span(data, size));
  const auto parsed = replayssm::parse_safetensors(file, "input");
  if (!parsed.ok()) {
    require(!parsed.status().message().empty());
    require(parsed.status().message().find('\n') == std::string::npos);
    return 0;
  }
  require(size >= 8);
  std::uint64_t header = 0;
  for (int i = 7; i >= 0; --i) header = header << 8 | data[i];
  std::size_t covered = 0;
  for (const replayssm::TensorInfo& tensor : parsed->tensors) {
    require(tensor.data.data() >= file.data() + 8 + header);
    require(tensor.data.data() + tensor.data.size() <= file.data() + size);
    require(parsed->find(tensor.name) == &tensor);
    covered += tensor.data.size();
    const auto view = replayssm::as_view(tensor);
    if (!view.ok()) continue;
    require(view->data == tensor.data.data());
    require(static_cast<std::uint64_t>(view->numel()) * replayssm::size_of(view->dtype) ==
            tensor.data.size());
  }
  require(covered == size - 8 - header);
  return 0;
}
