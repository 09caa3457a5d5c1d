#include "stitch/dist_optim/shard_format.h"

#include <system_error>

#include "stitch/base/error.h"

namespace stitch::optim {

void refuse_checkpoint(const std::filesystem::path& path, const std::string& why) {
  throw Error(ErrorCode::invalid_argument, "optimizer checkpoint " + path.string() + ' ' + why);
}

std::string system_error_text(int error) { return std::generic_category().message(error); }

}  // namespace stitch::optim
