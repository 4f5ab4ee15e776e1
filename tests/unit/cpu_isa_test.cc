// Which instruction sets run here, and REPLAYSSM_ISA.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string>

#include "replayssm/cpu.h"
#include "support/compare.h"

namespace replayssm {
namespace {

using testing::is_ok;
using testing::refused;

/// Sets REPLAYSSM_ISA for one scope.
class IsaVariable {
 public:
  explicit IsaVariable(const char* value) {
    if (const char* old = std::getenv("REPLAYSSM_ISA")) old_ = old;
    if (value == nullptr) {
      ::unsetenv("REPLAYSSM_ISA");
    } else {
      ::setenv("REPLAYSSM_ISA", value, 1);
    }
  }
  ~IsaVariable() {
    if (old_) {
      ::setenv("REPLAYSSM_ISA", old_->c_str(), 1);
    } else {
      ::unsetenv("REPLAYSSM_ISA");
    }
  }
  IsaVariable(const IsaVariable&) = delete;
  IsaVariable& operator=(const IsaVariable&) = delete;

 private:
  std::optional<std::string> old_;
};

TEST(CpuIsa, GenericIsAlwaysSupportedAndWorst) {
  const std::vector<CpuIsa> isas = supported_isas();
  ASSERT_FALSE(isas.empty());
  EXPECT_EQ(isas.front(), CpuIsa::kGeneric);
  EXPECT_TRUE(std::is_sorted(isas.begin(), isas.end()));
  EXPECT_EQ(std::adjacent_find(isas.begin(), isas.end()), isas.end());
}

TEST(CpuIsa, Names) {
  EXPECT_STREQ(to_string(CpuIsa::kGeneric), "generic");
  EXPECT_STREQ(to_string(CpuIsa::kAvx2), "avx2");
  EXPECT_STREQ(to_string(CpuIsa::kAvx512), "avx512");
}

TEST(CpuIsa, TheBestOneIsTheDefault) {
  const IsaVariable unset(nullptr);
  const Result<CpuIsa> isa = select_isa();
  ASSERT_TRUE(is_ok(isa));
  EXPECT_EQ(isa.value(), supported_isas().back());
}

TEST(CpuIsa, TheVariableForcesOne) {
  for (const CpuIsa isa : supported_isas()) {
    const IsaVariable forced(to_string(isa));
    const Result<CpuIsa> selected = select_isa();
    ASSERT_TRUE(is_ok(selected));
    EXPECT_EQ(selected.value(), isa);
  }
}

TEST(CpuIsa, UnknownAndUnsupportedValuesAreRefused) {
  for (const char* value : {"sse2", "AVX2", "avx2 ", "avx", "best", "1"}) {
    const IsaVariable forced(value);
    const Result<CpuIsa> selected = select_isa();
    ASSERT_FALSE(selected.ok()) << value;
    EXPECT_NE(selected.status().message().find(value), std::string::npos)
        << selected.status().message();
    EXPECT_NE(selected.status().message().find("generic"), std::string::npos)
        << selected.status().message();
  }
  for (const CpuIsa isa : {CpuIsa::kAvx2, CpuIsa::kAvx512}) {
    const std::vector<CpuIsa> supported = supported_isas();
    if (std::find(supported.begin(), supported.end(), isa) != supported.end()) continue;
    const IsaVariable forced(to_string(isa));
    const Result<CpuIsa> selected = select_isa();
    ASSERT_FALSE(selected.ok()) << to_string(isa);
    EXPECT_NE(selected.status().message().find(to_string(isa)), std::string::npos);
  }
}

}  // namespace
}  // namespace replayssm
