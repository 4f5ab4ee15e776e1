#include "replayssm/cuda.h"

namespace replayssm {

Status to_status(const DeviceError& error) {
  switch (error.what) {
    case DeviceError::kNone:
      return {};
    case DeviceError::kSlot:
      return invalid_argument("row ", error.row, ": slot ", error.found,
                              " is out of range, expected 0..", error.allowed);
    case DeviceError::kTokenRange:
      return invalid_argument("row ", error.row, ": tokens reach ", error.found, ", the limit is ",
                              error.allowed);
    case DeviceError::kTokenCount:
      return invalid_argument("row ", error.row, ": a tentative row carries ", error.found,
                              " tokens, expected 1..", error.allowed, " (draft capacity T)");
    case DeviceError::kAccepted:
      return invalid_argument("row ", error.row, ": accepted ", error.found, " of ", error.allowed,
                              " tokens");
    case DeviceError::kCursor:
      return failed_precondition("row ", error.row, ": the slot has ", error.found,
                                 " live records, expected 0..", error.allowed);
    case DeviceError::kDuplicate:
      return invalid_argument("row ", error.row, ": slot ", error.found, " is already in row ",
                              error.allowed);
    case DeviceError::kCondition:
      return failed_precondition("row ", error.row, ": the slot is ",
                                 to_string(static_cast<SlotCondition>(error.found)), ", expected ",
                                 to_string(static_cast<SlotCondition>(error.allowed)));
    default:
      return make_status(StatusCode::kInternal, "device error ", error.what, " of row ", error.row);
  }
}

}  // namespace replayssm
