// The architectures, one file each.
#pragma once

#include "model/model.h"

namespace replayssm {

extern const ModelFamily kNemotronH;
extern const ModelFamily kQwen35;

}  // namespace replayssm
