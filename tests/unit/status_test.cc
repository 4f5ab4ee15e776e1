// Status, Result, TensorView and their texts.
#include "replayssm/status.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "replayssm/device.h"
#include "replayssm/step.h"
#include "replayssm/tensor.h"

namespace replayssm {
namespace {

TEST(Status, DefaultIsOk) {
  const Status status;
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(status.code(), StatusCode::kOk);
  EXPECT_TRUE(status.message().empty());
}

TEST(Status, MakersWriteTheirArguments) {
  const Status status = invalid_argument("window is ", 3, ", expected ", 1.5);
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "window is 3, expected 1.5");
  EXPECT_EQ(failed_precondition("").code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(unsupported("").code(), StatusCode::kUnsupported);
  EXPECT_EQ(resource_exhausted("").code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(not_found("").code(), StatusCode::kNotFound);
  EXPECT_EQ(data_loss("").code(), StatusCode::kDataLoss);
}

TEST(Status, EveryCodeHasAName) {
  for (int code = 0; code <= static_cast<int>(StatusCode::kInternal); ++code) {
    EXPECT_FALSE(std::string(to_string(static_cast<StatusCode>(code))).empty());
  }
}

Result<std::unique_ptr<int>> make(bool fail) {
  if (fail) return data_loss("lost");
  return std::make_unique<int>(7);
}

Status use(bool fail, int& out) {
  RSSM_ASSIGN_OR_RETURN(const std::unique_ptr<int> value, make(fail));
  RSSM_RETURN_IF_ERROR(Status{});
  out = *value;
  return {};
}

TEST(Result, MovesItsValueOrReturnsItsStatus) {
  int out = 0;
  EXPECT_TRUE(use(false, out).ok());
  EXPECT_EQ(out, 7);
  out = 0;
  const Status status = use(true, out);
  EXPECT_EQ(status.code(), StatusCode::kDataLoss);
  EXPECT_EQ(status.message(), "lost");
  EXPECT_EQ(out, 0);
}

TEST(TensorView, ContiguousStridesAndText) {
  float data[24] = {};
  const TensorView view = TensorView::contiguous(data, DType::kF32, {2, 3, 4});
  EXPECT_EQ(view.rank, 3);
  EXPECT_EQ(view.numel(), 24);
  EXPECT_EQ(view.strides[0], 12);
  EXPECT_EQ(view.strides[1], 4);
  EXPECT_EQ(view.strides[2], 1);
  EXPECT_EQ(to_string(view), "f32 (2, 3, 4)");
  EXPECT_TRUE(TensorView{}.empty());
}

TEST(Names, RowKindsAndDevices) {
  EXPECT_STREQ(to_string(RowKind::kCommitted), "committed");
  EXPECT_STREQ(to_string(RowKind::kTentative), "tentative");
  EXPECT_STREQ(to_string(DeviceKind::kCpu), "cpu");
  EXPECT_STREQ(to_string(DeviceKind::kCuda), "cuda");
}

}  // namespace
}  // namespace replayssm
