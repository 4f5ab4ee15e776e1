// The architectures, one file each.
#pragma once

#include "model/model.h"

namespace replayssm {

extern const ModelFamily kNemotronH;

}  // namespace replayssm
