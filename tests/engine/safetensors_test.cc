// The files the engine reads and writes: mapped files, safetensors, checkpoint folders. A loader
// that does not fail loudly runs on garbage instead (sglang#35797, vllm#35548, llama.cpp#27019), so
// every refusal is checked for its line: file, tensor, what was found, what was expected.
#include "io/safetensors.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "io/checkpoint.h"
#include "io/file.h"
#include "io/mapped_file.h"

namespace replayssm {
namespace {

namespace fs = std::filesystem;

std::span<const std::byte> as_bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

/// A safetensors file from its parts, whatever they say.
std::string file_of(std::string_view header, std::string_view data = {}) {
  std::string file;
  for (int shift = 0; shift < 64; shift += 8) {
    file += static_cast<char>(static_cast<std::uint64_t>(header.size()) >> shift & 0xff);
  }
  file += header;
  file += data;
  return file;
}

/// Writes well-formed files.
class FileBuilder {
 public:
  FileBuilder& add(std::string_view name, std::string_view dtype, std::string_view shape,
                   std::string_view data) {
    if (!entries_.empty()) entries_ += ",";
    entries_ += '"' + std::string(name) + R"(":{"dtype":")" + std::string(dtype) + R"(","shape":)" +
                std::string(shape) + R"(,"data_offsets":[)" + std::to_string(data_.size()) + "," +
                std::to_string(data_.size() + data.size()) + "]}";
    data_ += data;
    return *this;
  }
  template <typename T>
  FileBuilder& add(std::string_view name, std::string_view dtype, std::string_view shape,
                   const std::vector<T>& values) {
    return add(name, dtype, shape,
               {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)});
  }

  /// Pads the header with spaces so that the data section starts on a multiple of 8, as writers do.
  std::string build() const {
    std::string header = "{" + entries_ + "}";
    header.resize((header.size() + 7) / 8 * 8, ' ');
    return file_of(header, data_);
  }

 private:
  std::string entries_;
  std::string data_;
};

std::string entry(std::string_view dtype, std::string_view shape, std::string_view offsets) {
  return R"({"dtype":)" + std::string(dtype) + R"(,"shape":)" + std::string(shape) +
         R"(,"data_offsets":)" + std::string(offsets) + "}";
}

/// A header with one tensor, "w".
std::string one(std::string_view dtype, std::string_view shape, std::string_view offsets) {
  return R"({"w":)" + entry(dtype, shape, offsets) + "}";
}

void expect_refusal(const Status& status, StatusCode code,
                    std::initializer_list<std::string_view> parts) {
  EXPECT_EQ(status.code(), code) << status.message();
  EXPECT_EQ(status.message().find('\n'), std::string::npos) << status.message();
  for (const std::string_view part : parts) {
    EXPECT_NE(status.message().find(part), std::string::npos)
        << "expected \"" << part << "\" in: " << status.message();
  }
}

Status parse_status(std::string_view file) {
  return parse_safetensors(as_bytes(file), "m.safetensors").status();
}

void expect_corrupt(std::string_view file, std::initializer_list<std::string_view> parts) {
  const Status status = parse_status(file);
  expect_refusal(status, StatusCode::kDataLoss, parts);
  EXPECT_TRUE(status.message().starts_with("m.safetensors: ")) << status.message();
}

/// A copy of a file at an address that is a multiple of 64, as in a mapping.
class AlignedFile {
 public:
  explicit AlignedFile(std::string_view file) : blocks_(file.size() / 64 + 1), size_(file.size()) {
    std::memcpy(blocks_.data(), file.data(), file.size());
  }
  std::span<const std::byte> bytes() const {
    return std::as_bytes(std::span(blocks_)).first(size_);
  }

 private:
  struct alignas(64) Block {
    std::array<std::byte, 64> bytes;
  };
  std::vector<Block> blocks_;
  std::size_t size_;
};

class TempFolder {
 public:
  TempFolder() {
    std::string pattern = (fs::temp_directory_path() / "replayssm-io-XXXXXX").string();
    path_ = mkdtemp(pattern.data()) == nullptr ? fs::path() : fs::path(pattern);
  }
  ~TempFolder() {
    std::error_code error;
    if (!path_.empty()) fs::remove_all(path_, error);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  std::string path() const { return path_.string(); }
  std::string path(std::string_view name) const { return (path_ / name).string(); }
  void write(std::string_view name, std::string_view contents) const {
    std::ofstream(path_ / name, std::ios::binary) << contents;
  }
  std::size_t count() const {
    return static_cast<std::size_t>(
        std::distance(fs::directory_iterator(path_), fs::directory_iterator()));
  }

 private:
  fs::path path_;
};

// --- parse_safetensors: good files ---------------------------------------------------------------

TEST(Safetensors, ReadsMixedDTypes) {
  const std::vector<float> f32 = {1.0f, -2.5f, 3.25f, 0.0f, 5.0f, 6.0f};
  const std::vector<BF16> bf16 = {to_bf16(1.5f), to_bf16(-8.0f)};
  const std::vector<F16> f16 = {to_f16(0.5f), to_f16(65504.0f)};
  const AlignedFile file(FileBuilder()
                             .add("b.f32", "F32", "[2, 3]", f32)
                             .add("a.bf16", "BF16", "[2, 1]", bf16)
                             .add("c.f16", "F16", "[2]", f16)
                             .build());
  const auto parsed = parse_safetensors(file.bytes(), "m");
  ASSERT_TRUE(parsed.ok()) << parsed.status().message();
  ASSERT_EQ(parsed->tensors.size(), 3u);
  EXPECT_EQ(parsed->tensors[0].name, "a.bf16");  // sorted by name, not by offset
  EXPECT_EQ(parsed->tensors[1].name, "b.f32");
  EXPECT_EQ(parsed->tensors[2].name, "c.f16");
  EXPECT_EQ(parsed->tensors[1].shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(parsed->tensors[1].file, "m");

  const auto f32_view = as_view(*parsed->find("b.f32"));
  ASSERT_TRUE(f32_view.ok()) << f32_view.status().message();
  EXPECT_EQ(to_string(*f32_view), "f32 (2, 3)");
  EXPECT_EQ(f32_view->strides[0], 3);
  EXPECT_EQ(f32_view->strides[1], 1);
  for (std::size_t i = 0; i < f32.size(); ++i) EXPECT_EQ(f32_view->as<float>()[i], f32[i]);

  const auto bf16_view = as_view(*parsed->find("a.bf16"));
  ASSERT_TRUE(bf16_view.ok()) << bf16_view.status().message();
  EXPECT_EQ(to_string(*bf16_view), "bf16 (2, 1)");
  EXPECT_EQ(to_float(bf16_view->as<BF16>()[1]), -8.0f);

  const auto f16_view = as_view(*parsed->find("c.f16"));
  ASSERT_TRUE(f16_view.ok()) << f16_view.status().message();
  EXPECT_EQ(to_string(*f16_view), "f16 (2)");
  EXPECT_EQ(to_float(f16_view->as<F16>()[1]), 65504.0f);
}

// C89: a tensor that is absent is reported as absent, and never stands for another one.
TEST(Safetensors, FindIsExact) {
  const std::string file =
      FileBuilder().add("b", "U8", "[1]", "x").add("bb", "U8", "[1]", "y").build();
  const auto parsed = parse_safetensors(as_bytes(file), "m");
  ASSERT_TRUE(parsed.ok()) << parsed.status().message();
  EXPECT_NE(parsed->find("b"), nullptr);
  EXPECT_NE(parsed->find("bb"), nullptr);
  for (const char* name : {"", "a", "B", "bbb", "ba", "b ", "c"}) {
    EXPECT_EQ(parsed->find(name), nullptr) << name;
  }
}

// Rank-0 scales break readers that take the first extent for granted.
TEST(Safetensors, ReadsScalar) {
  const AlignedFile file(FileBuilder().add("scale", "F32", "[]", std::vector{0.125f}).build());
  const auto parsed = parse_safetensors(file.bytes(), "m");
  ASSERT_TRUE(parsed.ok()) << parsed.status().message();
  EXPECT_TRUE(parsed->tensors[0].shape.empty());
  EXPECT_EQ(parsed->tensors[0].numel(), 1);
  const auto view = as_view(parsed->tensors[0]);
  ASSERT_TRUE(view.ok()) << view.status().message();
  EXPECT_EQ(view->rank, 0);
  EXPECT_EQ(view->numel(), 1);
  EXPECT_EQ(*view->as<float>(), 0.125f);
}

TEST(Safetensors, ReadsEmptyTensorsWhereverTheyLie) {
  const AlignedFile file(FileBuilder()
                             .add("first", "F32", "[0]", "")
                             .add("a", "F32", "[1]", std::vector{1.0f})
                             .add("middle", "F32", "[3, 0, 2]", "")
                             .add("also_middle", "BF16", "[0, 4611686018427387904]", "")
                             .add("b", "F32", "[1]", std::vector{2.0f})
                             .add("last", "F32", "[0]", "")
                             .build());
  const auto parsed = parse_safetensors(file.bytes(), "m");
  ASSERT_TRUE(parsed.ok()) << parsed.status().message();
  EXPECT_EQ(parsed->tensors.size(), 6u);
  for (const char* name : {"first", "middle", "also_middle", "last"}) {
    const auto view = as_view(*parsed->find(name));
    ASSERT_TRUE(view.ok()) << view.status().message();
    EXPECT_EQ(view->numel(), 0);
    EXPECT_TRUE(parsed->find(name)->data.empty());
  }
  EXPECT_EQ(*as_view(*parsed->find("b"))->as<float>(), 2.0f);
}

TEST(Safetensors, ReadsMetadataAndPadding) {
  const std::string file = file_of(R"({"__metadata__":{"format":"pt","note":"é\n"},"w":)" +
                                       entry(R"("U8")", "[2]", "[0,2]") + "}      ",
                                   "ab");
  const auto parsed = parse_safetensors(as_bytes(file), "m");
  ASSERT_TRUE(parsed.ok()) << parsed.status().message();
  EXPECT_EQ(parsed->metadata,
            (std::map<std::string, std::string>{{"format", "pt"}, {"note", "é\n"}}));
  EXPECT_EQ(parsed->tensors.size(), 1u);
}

TEST(Safetensors, ReadsEmptyFile) {
  const auto parsed = parse_safetensors(as_bytes(file_of("{}")), "m");
  ASSERT_TRUE(parsed.ok()) << parsed.status().message();
  EXPECT_TRUE(parsed->tensors.empty());
}

TEST(Safetensors, IgnoresKeysOfLaterFormats) {
  const std::string file =
      file_of(R"({"w":{"shape":[1],"dtype":"U8","later":[{}],"data_offsets":[0,1]}})", "a");
  EXPECT_TRUE(parse_status(file).ok()) << parse_status(file).message();
}

TEST(Safetensors, ListsDTypesItCannotView) {
  const struct {
    const char* dtype;
    std::size_t bytes;  // of 8 elements
    bool viewable;
  } cases[] = {
      {"F64", 64, true},     {"F32", 32, true},     {"F16", 16, true},     {"BF16", 16, true},
      {"I64", 64, true},     {"I32", 32, true},     {"I16", 16, false},    {"I8", 8, false},
      {"U64", 64, false},    {"U32", 32, false},    {"U16", 16, false},    {"U8", 8, true},
      {"BOOL", 8, false},    {"C64", 64, false},    {"F8_E4M3", 8, false}, {"F8_E5M2", 8, false},
      {"F8_E8M0", 8, false}, {"F6_E2M3", 6, false}, {"F6_E3M2", 6, false}, {"F4", 4, false},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.dtype);
    const AlignedFile file(
        FileBuilder().add("w", c.dtype, "[2, 4]", std::string(c.bytes, 'x')).build());
    const auto parsed = parse_safetensors(file.bytes(), "m");
    ASSERT_TRUE(parsed.ok()) << parsed.status().message();
    const TensorInfo& tensor = parsed->tensors[0];
    EXPECT_EQ(tensor.dtype_name, c.dtype);
    EXPECT_EQ(tensor.dtype.has_value(), c.viewable);
    const auto view = as_view(tensor);
    if (c.viewable) {
      ASSERT_TRUE(view.ok()) << view.status().message();
      EXPECT_EQ(size_of(view->dtype) * 8, c.bytes);
    } else {
      expect_refusal(view.status(), StatusCode::kUnsupported,
                     {"m: tensor \"w\": found dtype ", c.dtype, "expected one of F64, F32"});
    }
  }
}

// --- as_view: refusals ---------------------------------------------------------------------------

TEST(Safetensors, ViewRefusesMisalignedData) {
  const AlignedFile file(FileBuilder()
                             .add("odd", "U8", "[1]", "x")
                             .add("w", "F32", "[1]", std::vector{1.0f})
                             .add("h", "BF16", "[1]", "xx")
                             .add("empty", "F32", "[0]", "")
                             .build());
  const auto parsed = parse_safetensors(file.bytes(), "m");
  ASSERT_TRUE(parsed.ok()) << parsed.status().message();
  expect_refusal(as_view(*parsed->find("w")).status(), StatusCode::kUnsupported,
                 {"m: tensor \"w\": found data 1 bytes past a multiple of 4",
                  "expected F32 data aligned to 4"});
  expect_refusal(as_view(*parsed->find("h")).status(), StatusCode::kUnsupported,
                 {"tensor \"h\": found data 1 bytes past a multiple of 2"});
  EXPECT_TRUE(as_view(*parsed->find("odd")).ok());
  EXPECT_TRUE(as_view(*parsed->find("empty")).ok());  // nothing there to read
}

TEST(Safetensors, ViewRefusesHighRank) {
  const AlignedFile file(FileBuilder()
                             .add("five", "F32", "[1,1,1,1,1]", std::vector{1.0f})
                             .add("six", "F32", "[1,1,1,1,1,1]", std::vector{1.0f})
                             .build());
  const auto parsed = parse_safetensors(file.bytes(), "m");
  ASSERT_TRUE(parsed.ok()) << parsed.status().message();
  EXPECT_TRUE(as_view(*parsed->find("five")).ok());
  expect_refusal(as_view(*parsed->find("six")).status(), StatusCode::kUnsupported,
                 {"m: tensor \"six\": found rank 6", "expected at most 5"});
}

// --- parse_safetensors: refusals -----------------------------------------------------------------

TEST(Safetensors, RefusesShortFile) {
  expect_corrupt("", {"found 0 bytes", "expected at least 8"});
  expect_corrupt("1234567", {"found 7 bytes", "expected at least 8"});
}

TEST(Safetensors, RefusesHeaderLength) {
  std::string file = file_of("{}", "abc");
  file[0] = 6;
  expect_corrupt(file, {"found header length 6", "expected at most 5, the bytes left"});
  file[7] = '\x7f';
  expect_corrupt(file, {"found header length 9151314442816847878", "expected at most 100000000"});
  file.replace(0, 8, std::string(8, '\xff'));
  expect_corrupt(file, {"found header length 18446744073709551615", "at most 100000000"});
  const std::uint32_t over = 100'000'001;
  file = file_of("{}");
  std::memcpy(file.data(), &over, sizeof(over));
  expect_corrupt(file, {"found header length 100000001", "at most 100000000"});
}

TEST(Safetensors, RefusesGitLfsPointer) {
  expect_corrupt("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n",
                 {"found a Git LFS pointer", "expected the safetensors file"});
}

TEST(Safetensors, RefusesHeaderThatIsNotAnObject) {
  expect_corrupt(file_of(""), {"found a header of 0 bytes", "expected a JSON object"});
  expect_corrupt(file_of("{\"w\":"), {"found a header of 5 bytes", "not JSON", "a JSON object"});
  expect_corrupt(file_of("{}{}"), {"found a header of 4 bytes", "not JSON"});
  expect_corrupt(file_of(std::string("{}\0", 3)), {"found a header of 3 bytes", "not JSON"});
  expect_corrupt(file_of("{\"a\xff\":1}"), {"not JSON", "UTF-8"});
  expect_corrupt(file_of("{\"a\xc0\xaf\":1}"), {"not JSON", "UTF-8"});  // overlong slash
  expect_corrupt(file_of("[1,2]"), {"found an array as header", "expected a JSON object"});
  expect_corrupt(file_of("17"), {"found 17 as header", "expected a JSON object"});
  expect_corrupt(file_of(" {}"), {"begins with \" \"", "expected \"{\""});
  expect_corrupt(file_of("{\"w\":" + std::string(5000, '[') + std::string(5000, ']') + "}"),
                 {"not JSON"});
}

TEST(Safetensors, RefusesBadEntry) {
  expect_corrupt(file_of(R"({"w":3})"), {"tensor \"w\": found 3", "expected an object"});
  expect_corrupt(file_of(R"({"w":{"dtype":"F32","shape":[0]}})"),
                 {"tensor \"w\": found no \"data_offsets\"", "expected \"dtype\", \"shape\""});
  expect_corrupt(file_of(R"({"w":{"dtype":"F32","data_offsets":[0,0]}})"), {"no \"shape\""});
  expect_corrupt(file_of(R"({"w":{"shape":[0],"data_offsets":[0,0]}})"), {"no \"dtype\""});
  expect_corrupt(file_of(R"({"w":{"dtype":"F32","shape":[0],"shape":[1],"data_offsets":[0,0]}})"),
                 {"tensor \"w\": found key \"shape\" twice", "expected it once"});
}

TEST(Safetensors, RefusesUnknownDType) {
  expect_refusal(parse_status(file_of(one(R"("F33")", "[1]", "[0,4]"), "abcd")),
                 StatusCode::kUnsupported,
                 {"m.safetensors: tensor \"w\": found dtype \"F33\"", "expected one of F64, F32"});
  expect_refusal(parse_status(file_of(one(R"("f32")", "[1]", "[0,4]"), "abcd")),
                 StatusCode::kUnsupported, {"found dtype \"f32\""});
  expect_corrupt(file_of(one("4", "[1]", "[0,4]"), "abcd"),
                 {"tensor \"w\": found dtype 4", "expected a string"});
}

TEST(Safetensors, RefusesBadShape) {
  const auto with_shape = [](std::string_view shape) {
    return file_of(one(R"("F32")", shape, "[0,4]"), "abcd");
  };
  expect_corrupt(with_shape("1"), {"tensor \"w\": found shape 1", "expected an array"});
  expect_corrupt(with_shape("[-1]"), {"found extent -1", "expected an integer from 0"});
  expect_corrupt(with_shape("[-1,-1]"), {"found extent -1"});
  expect_corrupt(with_shape("[1.0]"), {"found extent 1.0", "expected an integer"});
  expect_corrupt(with_shape(R"(["1"])"), {"found extent \"1\"", "expected an integer"});
  expect_corrupt(with_shape("[true]"), {"found extent true"});
  expect_corrupt(with_shape("[null]"), {"found extent null"});
  expect_corrupt(with_shape("[[1]]"), {"found extent an array"});
  expect_corrupt(with_shape("[9223372036854775808]"),
                 {"found extent 9223372036854775808", "to 9223372036854775807"});
  expect_corrupt(with_shape("[4611686018427387904, 4]"),
                 {"tensor \"w\": found shape [4611686018427387904, 4]",
                  "expected a product of at most 9223372036854775807"});
  // 2^32 * 2^32 * 2^32 wraps to 0 and an extent of 0 hides it: the strides would still overflow.
  expect_corrupt(file_of(one(R"("F32")", "[4294967296,4294967296,4294967296]", "[0,0]")),
                 {"product of at most"});
  expect_corrupt(file_of(one(R"("F32")", "[0,4294967296,4294967296]", "[0,0]")),
                 {"found shape [0, 4294967296, 4294967296]", "product of at most"});
  // The elements fit int64, their bits do not.
  expect_corrupt(with_shape("[9223372036854775807]"),
                 {"found 4 bytes", "expected 9223372036854775807 elements of 32 bits"});
}

TEST(Safetensors, RefusesBadOffsets) {
  const auto with_offsets = [](std::string_view offsets) {
    return file_of(one(R"("F32")", "[1]", offsets), "abcd");
  };
  expect_corrupt(with_offsets("4"), {"tensor \"w\": found data_offsets 4", "two integers"});
  expect_corrupt(with_offsets("{}"), {"found data_offsets an object", "two integers"});
  expect_corrupt(with_offsets("[]"), {"found 0 data_offsets", "expected 2"});
  expect_corrupt(with_offsets("[0]"), {"found 1 data_offsets", "expected 2"});
  expect_corrupt(with_offsets("[0,4,8]"), {"found 3 data_offsets", "expected 2"});
  expect_corrupt(with_offsets("[-4,0]"), {"found data offset -4", "expected an integer from 0"});
  expect_corrupt(with_offsets("[0,4.0]"), {"found data offset 4.0", "expected an integer"});
  expect_corrupt(with_offsets("[0,18446744073709551615]"),
                 {"found data offset 18446744073709551615", "to 9223372036854775807"});
  expect_corrupt(with_offsets("[4,0]"),
                 {"tensor \"w\": found data_offsets [4, 0]", "expected begin at most end"});
  expect_corrupt(with_offsets("[0,5]"), {"found data_offsets [0, 5]", "an end of at most 4"});
  expect_corrupt(with_offsets("[9223372036854775803,9223372036854775807]"), {"end of at most 4"});
}

// C88: a wrong length is refused where it is found, with both lengths, before any model sees it.
TEST(Safetensors, RefusesLengthThatDoesNotMatchShape) {
  expect_corrupt(file_of(one(R"("F32")", "[2]", "[0,4]"), "abcd"),
                 {"tensor \"w\": found 4 bytes", "expected 8 for F32 [2]"});
  expect_corrupt(file_of(one(R"("BF16")", "[1]", "[0,4]"), "abcd"),
                 {"found 4 bytes", "expected 2 for BF16 [1]"});
  expect_corrupt(file_of(one(R"("F32")", "[]", "[0,0]")),
                 {"found 0 bytes", "expected 4 for F32 []"});
  expect_corrupt(file_of(one(R"("F32")", "[0]", "[0,4]"), "abcd"),
                 {"found 4 bytes", "expected 0 for F32 [0]"});
  expect_corrupt(file_of(one(R"("F4")", "[3]", "[0,1]"), "a"),
                 {"found F4 [3] of 12 bits", "expected whole bytes"});
}

TEST(Safetensors, RefusesOverlapHoleAndTrailingBytes) {
  const auto two = [](std::string_view a, std::string_view b) {
    return R"({"b":)" + entry(R"("F32")", "[1]", b) + R"(,"a":)" + entry(R"("F32")", "[1]", a) +
           "}";
  };
  EXPECT_TRUE(parse_status(file_of(two("[0,4]", "[4,8]"), "abcdefgh")).ok());
  expect_corrupt(
      file_of(two("[0,4]", "[2,6]"), "abcdef"),
      {"tensor \"b\": found data at offset 2", "expected 4, the end of tensor \"a\"", "overlap"});
  expect_corrupt(file_of(two("[0,4]", "[0,4]"), "abcd"), {"offset 0", "expected 4", "overlap"});
  expect_corrupt(
      file_of(two("[0,4]", "[5,9]"), "abcdefghi"),
      {"tensor \"b\": found data at offset 5", "expected 4, the end of tensor \"a\"", "hole"});
  expect_corrupt(
      file_of(two("[1,5]", "[5,9]"), "abcdefghi"),
      {"tensor \"a\": found data at offset 1", "expected 0, the start of the data", "hole"});
  expect_corrupt(
      file_of(two("[0,4]", "[4,8]"), "abcdefghi"),
      {"found a data section of 9 bytes", "expected 8, the end of tensor \"b\"", "trailing"});
  expect_corrupt(file_of("{}", "a"), {"data section of 1 bytes", "expected 0", "trailing"});
  // An empty tensor inside another one.
  expect_corrupt(file_of(R"({"a":)" + entry(R"("F32")", "[1]", "[0,4]") + R"(,"z":)" +
                             entry(R"("F32")", "[0]", "[2,2]") + "}",
                         "abcd"),
                 {"tensor \"z\": found data at offset 2", "expected 4", "overlap"});
}

TEST(Safetensors, RefusesDuplicates) {
  const std::string u8 = entry(R"("U8")", "[1]", "[0,1]");
  const std::string next = entry(R"("U8")", "[1]", "[1,2]");
  expect_corrupt(file_of(R"({"w":)" + u8 + R"(,"w":)" + next + "}", "ab"),
                 {"tensor \"w\": found twice", "expected it once"});
  // The same name, spelled in another way.
  expect_corrupt(file_of(R"({"w":)" + u8 + R"(,"\u0077":)" + next + "}", "ab"),
                 {"tensor \"w\": found twice"});
  expect_corrupt(file_of(R"({"__metadata__":{},"__metadata__":{}})"),
                 {"found __metadata__ twice", "expected it once"});
  expect_corrupt(file_of(R"({"__metadata__":{"k":"1","k":"2"}})"),
                 {"__metadata__: found key \"k\" twice", "expected it once"});
}

TEST(Safetensors, RefusesMetadataThatIsNotStrings) {
  expect_corrupt(file_of(R"({"__metadata__":["pt"]})"),
                 {"__metadata__: found an array", "expected an object of strings"});
  expect_corrupt(file_of(R"({"__metadata__":{"k":1}})"),
                 {"__metadata__: key \"k\": found 1", "expected a string"});
}

TEST(Safetensors, MessageStaysOneShortLineForHostileNames) {
  expect_corrupt(file_of(R"({"a\n\u001b[2J\"\u00e9":1})"),
                 {R"(tensor "a\x0a\x1b[2J\"\xc3\xa9": found 1)"});
  const Status status = parse_status(file_of("{\"" + std::string(100000, 'n') + "\":1}"));
  expect_refusal(status, StatusCode::kDataLoss, {"nnn...\": found 1"});
  EXPECT_LT(status.message().size(), 400u);
  std::string shape = "[1";
  for (int i = 0; i < 10000; ++i) shape += ",1";
  const Status long_shape = parse_status(file_of(one(R"("U8")", shape + "]", "[0,0]")));
  expect_refusal(long_shape, StatusCode::kDataLoss, {"found 0 bytes", "expected 1 for U8 [1, 1"});
  EXPECT_LT(long_shape.message().size(), 400u);
}

// --- sweeps --------------------------------------------------------------------------------------

std::string small_file() {
  return FileBuilder()
      .add("scale", "F32", "[]", std::vector{0.5f})
      .add("w", "BF16", "[2,2]", "abcdefgh")
      .add("empty", "F32", "[0]", "")
      .add("q", "I8", "[3]", "xyz")
      .build();
}

/// Reads all that a parsed file gives access to, for the sanitizers.
std::size_t touch(const SafetensorsFile& file) {
  std::size_t sum = 0;
  for (const TensorInfo& tensor : file.tensors) {
    for (const std::byte b : tensor.data) sum += std::to_integer<std::size_t>(b);
    const auto view = as_view(tensor);
    if (view.ok()) sum += static_cast<std::size_t>(view->numel());
  }
  return sum;
}

TEST(Safetensors, RefusesTruncationAtEveryByte) {
  const std::string file = small_file();
  ASSERT_TRUE(parse_status(file).ok()) << parse_status(file).message();
  for (std::size_t length = 0; length < file.size(); ++length) {
    // An allocation of its own, so that a read past the end is seen.
    const std::vector<char> cut(file.begin(), file.begin() + static_cast<std::ptrdiff_t>(length));
    const Status status = parse_status({cut.data(), cut.size()});
    EXPECT_EQ(status.code(), StatusCode::kDataLoss) << length;
    EXPECT_EQ(status.message().find("m.safetensors: "), 0u) << status.message();
  }
}

TEST(Safetensors, SurvivesEveryByteChange) {
  const std::string file = small_file();
  std::size_t accepted = 0;
  for (std::size_t i = 0; i < file.size(); ++i) {
    for (int value = 0; value < 256; ++value) {
      std::vector<char> changed(file.begin(), file.end());
      changed[i] = static_cast<char>(value);
      const auto parsed = parse_safetensors(as_bytes({changed.data(), changed.size()}), "m");
      if (parsed.ok()) {
        touch(*parsed);
        ++accepted;
      } else {
        ASSERT_FALSE(parsed.status().message().empty());
        ASSERT_EQ(parsed.status().message().find('\n'), std::string::npos);
      }
    }
  }
  EXPECT_GT(accepted, 0u);  // data bytes and letters of names are free to change
}

// --- MappedFile, read_file, write_file_atomically ------------------------------------------------

TEST(MappedFile, MapsWholeFile) {
  const TempFolder folder;
  folder.write("a", "hello");
  auto file = MappedFile::open(folder.path("a"));
  ASSERT_TRUE(file.ok()) << file.status().message();
  const std::byte* address = file->bytes().data();
  MappedFile moved = std::move(file).value();
  EXPECT_EQ(moved.bytes().data(), address);
  MappedFile assigned;
  EXPECT_TRUE(assigned.bytes().empty());
  assigned = std::move(moved);
  ASSERT_EQ(assigned.bytes().size(), 5u);
  EXPECT_EQ(std::memcmp(assigned.bytes().data(), "hello", 5), 0);
}

TEST(MappedFile, MapsEmptyFile) {
  const TempFolder folder;
  folder.write("a", "");
  const auto file = MappedFile::open(folder.path("a"));
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_TRUE(file->bytes().empty());
}

TEST(MappedFile, RefusesWhatIsNoFile) {
  const TempFolder folder;
  const std::string absent = folder.path("absent");
  expect_refusal(MappedFile::open(absent).status(), StatusCode::kNotFound,
                 {absent, "No such file"});
  expect_refusal(MappedFile::open(folder.path()).status(), StatusCode::kInvalidArgument,
                 {folder.path(), "found a directory", "expected a regular file"});
  expect_refusal(MappedFile::open("/dev/null").status(), StatusCode::kInvalidArgument,
                 {"/dev/null", "found a character device", "expected a regular file"});
  const std::string fifo = folder.path("fifo");
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  expect_refusal(MappedFile::open(fifo).status(), StatusCode::kInvalidArgument,
                 {fifo, "found a FIFO", "expected a regular file"});  // and does not wait
}

TEST(ReadFile, ReadsUpToTheLimit) {
  const TempFolder folder;
  const std::string contents("ab\0cd", 5);
  folder.write("a", contents);
  folder.write("empty", "");
  const auto text = read_file(folder.path("a"), 5);
  ASSERT_TRUE(text.ok()) << text.status().message();
  EXPECT_EQ(*text, contents);
  expect_refusal(read_file(folder.path("a"), 4).status(), StatusCode::kResourceExhausted,
                 {folder.path("a"), "found 5 bytes", "expected at most 4"});
  const auto empty = read_file(folder.path("empty"), 0);
  ASSERT_TRUE(empty.ok()) << empty.status().message();
  EXPECT_TRUE(empty->empty());
  expect_refusal(read_file(folder.path("absent"), 4).status(), StatusCode::kNotFound,
                 {"absent", "No such file"});
  expect_refusal(read_file(folder.path(), 4).status(), StatusCode::kInvalidArgument,
                 {"found a directory", "expected a regular file"});
}

// Files of /proc say that they are empty: the limit must hold for what is read, too.
TEST(ReadFile, LimitHoldsForFilesThatGrow) {
  const std::string path = "/proc/self/status";
  if (!fs::exists(path)) GTEST_SKIP() << "no " << path;
  const auto text = read_file(path, 1 << 20);
  ASSERT_TRUE(text.ok()) << text.status().message();
  EXPECT_GT(text->size(), 100u);
  expect_refusal(read_file(path, 10).status(), StatusCode::kResourceExhausted,
                 {"found more than 10 bytes", "expected at most 10"});
}

TEST(WriteFile, CreatesAndReplaces) {
  const TempFolder folder;
  const std::string path = folder.path("session");
  for (const std::string_view contents :
       {std::string_view("first"), std::string_view(), std::string_view("third\0!", 7)}) {
    const Status status = write_file_atomically(path, as_bytes(contents));
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(*read_file(path, 100), contents);
    EXPECT_EQ(folder.count(), 1u);
  }
  const std::string longest = folder.path(std::string(255, 'n'));
  EXPECT_TRUE(write_file_atomically(longest, as_bytes("x")).ok());
}

TEST(WriteFile, ObeysTheUmask) {
  const TempFolder folder;
  const mode_t old = umask(027);
  const Status status = write_file_atomically(folder.path("a"), as_bytes("x"));
  umask(old);
  ASSERT_TRUE(status.ok()) << status.message();
  struct stat info = {};
  ASSERT_EQ(stat(folder.path("a").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0640u);
}

TEST(WriteFile, FailureLeavesNothingBehind) {
  const TempFolder folder;
  expect_refusal(write_file_atomically(folder.path("no/such/a"), as_bytes("x")),
                 StatusCode::kNotFound, {"no/such/a", "cannot create"});
  EXPECT_EQ(folder.count(), 0u);
  fs::create_directory(folder.path("taken"));
  const Status taken = write_file_atomically(folder.path("taken"), as_bytes("x"));
  EXPECT_FALSE(taken.ok());
  EXPECT_NE(taken.message().find("cannot replace"), std::string::npos) << taken.message();
  EXPECT_EQ(folder.count(), 1u);
}

TEST(WriteFile, FullDiskKeepsTheOldFile) {
  const TempFolder folder;
  const std::string path = folder.path("session");
  ASSERT_TRUE(write_file_atomically(path, as_bytes("old")).ok());
  // A limit on the size of files stands for a disk that fills up halfway.
  rlimit limit = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit small = limit;
  small.rlim_cur = 1000;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const Status status = write_file_atomically(path, as_bytes(std::string(5000, 'x')));
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  std::signal(SIGXFSZ, old_handler);
  expect_refusal(status, StatusCode::kResourceExhausted, {path, "cannot write"});
  EXPECT_EQ(*read_file(path, 100), "old");
  EXPECT_EQ(folder.count(), 1u);
}

// --- Checkpoint ----------------------------------------------------------------------------------

constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";
constexpr const char* kShard1 = "model-00001-of-00002.safetensors";
constexpr const char* kShard2 = "model-00002-of-00002.safetensors";

std::string shard(std::initializer_list<const char*> names) {
  FileBuilder builder;
  for (const char* name : names) builder.add(name, "F32", "[1]", std::vector{1.0f});
  return builder.build();
}

/// "a" and "c" in the first shard, "b" in the second.
void write_sharded(const TempFolder& folder) {
  folder.write(kShard1, shard({"c", "a"}));
  folder.write(kShard2, shard({"b"}));
  folder.write(kIndex, std::string(R"({"metadata":{"total_size":12},"weight_map":{"a":")") +
                           kShard1 + R"(","b":")" + kShard2 + R"(","c":")" + kShard1 + R"("}})");
}

Status open_status(const TempFolder& folder) { return Checkpoint::open(folder.path()).status(); }

void expect_refused(const TempFolder& folder, StatusCode code,
                    std::initializer_list<std::string_view> parts) {
  expect_refusal(open_status(folder), code, parts);
  expect_refusal(open_status(folder), code, {folder.path()});
}

TEST(Checkpoint, OpensSingleFile) {
  const TempFolder folder;
  folder.write(kSingle, shard({"b", "a"}));
  const auto checkpoint = Checkpoint::open(folder.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  EXPECT_EQ(checkpoint->names(), (std::vector<std::string_view>{"a", "b"}));
  EXPECT_EQ(checkpoint->total_bytes(), 8u);
  ASSERT_NE(checkpoint->find("a"), nullptr);
  EXPECT_EQ(checkpoint->find("a")->file, folder.path(kSingle));
  EXPECT_EQ(*as_view(*checkpoint->find("a"))->as<float>(), 1.0f);
}

TEST(Checkpoint, OpensShards) {
  const TempFolder folder;
  write_sharded(folder);
  auto opened = Checkpoint::open(folder.path());
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  const Checkpoint checkpoint = std::move(opened).value();  // moving keeps the mappings
  EXPECT_EQ(checkpoint.names(), (std::vector<std::string_view>{"a", "b", "c"}));
  EXPECT_EQ(checkpoint.total_bytes(), 12u);
  EXPECT_EQ(checkpoint.find("b")->file, folder.path(kShard2));
  for (const TensorInfo& tensor : checkpoint.tensors()) {
    EXPECT_EQ(*as_view(tensor)->as<float>(), 1.0f);
  }
}

// C89: a draft head that lost a tensor is seen by its lookup; there is no default to run on.
TEST(Checkpoint, MissingTensorIsNull) {
  const TempFolder folder;
  write_sharded(folder);
  const auto checkpoint = Checkpoint::open(folder.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  EXPECT_EQ(checkpoint->find("mtp.fc.weight"), nullptr);
  EXPECT_EQ(checkpoint->find(""), nullptr);
}

// Snapshots of the Hub cache are folders of links to blobs elsewhere.
TEST(Checkpoint, FollowsLinks) {
  const TempFolder blobs;
  const TempFolder folder;
  blobs.write("0123", shard({"a"}));
  fs::create_symlink(blobs.path("0123"), folder.path(kSingle));
  EXPECT_TRUE(open_status(folder).ok()) << open_status(folder).message();
  fs::remove(blobs.path("0123"));
  expect_refused(folder, StatusCode::kNotFound, {kSingle, "No such file"});
}

TEST(Checkpoint, RefusesFolderWithoutWeights) {
  const TempFolder folder;
  expect_refused(folder, StatusCode::kNotFound, {"found no weights", kSingle, kIndex});
  expect_refusal(Checkpoint::open(folder.path("absent")).status(), StatusCode::kNotFound,
                 {folder.path("absent"), "found no folder", "expected one with"});
}

TEST(Checkpoint, ErrorsOfAFileNameIt) {
  const TempFolder folder;
  folder.write(kSingle, file_of(one(R"("F32")", "[2]", "[0,4]"), "abcd"));
  expect_refused(folder, StatusCode::kDataLoss,
                 {folder.path(kSingle), "tensor \"w\": found 4 bytes", "expected 8"});
  folder.write(kSingle, "");
  expect_refused(folder, StatusCode::kDataLoss, {folder.path(kSingle), "found 0 bytes"});
  fs::remove(folder.path(kSingle));
  write_sharded(folder);
  const std::string second = shard({"b"});
  folder.write(kShard2, std::string_view(second).substr(0, second.size() - 1));
  expect_refused(folder, StatusCode::kDataLoss,
                 {folder.path(kShard2), "tensor \"b\": found data_offsets [0, 4]", "at most 3"});
}

TEST(Checkpoint, IndexDecides) {
  const TempFolder folder;
  write_sharded(folder);
  folder.write(kSingle, shard({"a", "b", "c"}));
  expect_refused(folder, StatusCode::kDataLoss,
                 {"found model.safetensors and model.safetensors.index.json",
                  "expected only one set of weights"});
  // An index of one shard, under the name of a single file.
  folder.write(kIndex, R"({"weight_map":{"a":"model.safetensors"}})");
  folder.write(kSingle, shard({"a"}));
  EXPECT_TRUE(open_status(folder).ok()) << open_status(folder).message();
}

TEST(Checkpoint, RefusesBadIndex) {
  const TempFolder folder;
  folder.write(kIndex, "{");
  expect_refused(folder, StatusCode::kDataLoss, {kIndex, "found 1 bytes that are not JSON"});
  for (const char* index : {"[]", "{}", R"({"weight_map":[]})"}) {
    folder.write(kIndex, index);
    expect_refused(folder, StatusCode::kDataLoss,
                   {kIndex, "found no object \"weight_map\"", "expected one from tensor to file"});
  }
  folder.write(kIndex, R"({"weight_map":{}})");
  expect_refused(folder, StatusCode::kDataLoss, {kIndex, "found an empty weight_map"});
  folder.write(kIndex, R"({"weight_map":{"a":1}})");
  expect_refused(folder, StatusCode::kDataLoss,
                 {kIndex, "tensor \"a\": found a value that is not a string"});
  folder.write(kIndex, R"({"weight_map":{"a":"x.safetensors","a":"y.safetensors"}})");
  expect_refused(folder, StatusCode::kDataLoss,
                 {kIndex, "tensor \"a\": found twice in weight_map", "expected it once"});
}

TEST(Checkpoint, RefusesShardsOutsideTheFolder) {
  const TempFolder outside;
  const TempFolder folder;
  outside.write("w.safetensors", shard({"a"}));
  const std::string name = fs::path(outside.path()).filename().string();
  const struct {
    std::string shard;    // as JSON
    std::string message;  // as the message quotes it
  } cases[] = {
      {outside.path("w.safetensors"), outside.path("w.safetensors")},
      {"../" + name + "/w.safetensors", "../" + name + "/w.safetensors"},
      {"..", ".."},
      {".", "."},
      {"", ""},
      {"sub/w.safetensors", "sub/w.safetensors"},
      {R"(..\\w.safetensors)", R"(..\\w.safetensors)"},
      {R"(w\u0000.safetensors)", R"(w\x00.safetensors)"},
      {R"(w\n.safetensors)", R"(w\x0a.safetensors)"},
  };
  for (const auto& c : cases) {
    folder.write(kIndex, R"({"weight_map":{"a":")" + c.shard + R"("}})");
    expect_refused(folder, StatusCode::kDataLoss,
                   {kIndex, "tensor \"a\": found \"" + c.message + "\"",
                    "expected the plain name of a file in the folder"});
  }
}

TEST(Checkpoint, RefusesMissingShard) {
  const TempFolder folder;
  write_sharded(folder);
  fs::remove(folder.path(kShard2));
  expect_refused(folder, StatusCode::kNotFound,
                 {folder.path(kShard2), "No such file", kIndex, "places tensor \"b\" in it"});
}

TEST(Checkpoint, RefusesShardsThatDisagreeWithIndex) {
  const TempFolder folder;
  write_sharded(folder);
  folder.write(kShard1, shard({"a"}));  // C89: "c" is lost
  expect_refused(folder, StatusCode::kDataLoss,
                 {folder.path(kShard1), "tensor \"c\": found no such tensor among 1",
                  "places it in this file"});
  folder.write(kShard1, shard({"a", "c", "extra"}));
  expect_refused(folder, StatusCode::kDataLoss,
                 {folder.path(kShard1), "tensor \"extra\": found in this file",
                  "expected only tensors that the weight_map"});
  folder.write(kShard1, shard({"a", "c", "b"}));  // "b" twice
  expect_refused(folder, StatusCode::kDataLoss,
                 {folder.path(kShard1), "tensor \"b\": found in this file",
                  "expected only in \"model-00002-of-00002.safetensors\""});
  folder.write(kShard1, shard({"a", "c"}));
  EXPECT_TRUE(open_status(folder).ok()) << open_status(folder).message();
}

}  // namespace
}  // namespace replayssm
