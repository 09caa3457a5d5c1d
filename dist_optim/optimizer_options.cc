#include "stitch/dist_optim/optimizer_options.h"

#include <torch/serialize/archive.h>

#include <sstream>

#include "stitch/transport/error.h"

namespace stitch::optim {

std::string encode_options(const torch::optim::OptimizerOptions& options) {
  torch::serialize::OutputArchive archive;
  options.serialize(archive);
  std::ostringstream out;
  archive.save_to(out);
  return out.str();
}

void decode_options(const std::string& bytes, torch::optim::OptimizerOptions& options) {
  try {
    std::istringstream in(bytes);
    torch::serialize::InputArchive archive;
    archive.load_from(in);
    options.serialize(archive);
  } catch (const c10::Error& error) {
    throw Error(ErrorCode::invalid_argument,
                std::string("optimizer options cannot be read: ") + error.what_without_backtrace());
  }
}

}  // namespace stitch::optim
