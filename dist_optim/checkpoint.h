#pragma once

#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <string>

namespace stitch::optim {

// The optimizer state of one owner's parameters in one file (libtorch's archive format), by the
// parameters' positions, with their shapes. Written beside the file and renamed, so a crash leaves
// the old file. Not thread-safe.
class CheckpointWriter {
 public:
  void add(std::size_t position, const at::Tensor& parameter,
           const torch::optim::Optimizer& optimizer);
  // Throws Error(invalid_argument) naming the file when it cannot be written. Makes its folder.
  void write(const std::string& file);

 private:
  torch::serialize::OutputArchive archive_;
  std::int64_t count_ = 0;
};

class CheckpointReader {
 public:
  // Throws Error(invalid_argument) naming the file when it cannot be read or is for another number
  // of parameters.
  CheckpointReader(const std::string& file, std::size_t parameters);
  // Throws Error(invalid_argument) when the saved parameter had another shape.
  void check(std::size_t position, const at::Tensor& parameter);
  void read(std::size_t position, torch::optim::Optimizer& optimizer);

 private:
  const std::string file_;
  torch::serialize::InputArchive archive_;
};

}  // namespace stitch::optim
