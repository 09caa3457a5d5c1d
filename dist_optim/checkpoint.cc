#include "stitch/dist_optim/checkpoint.h"

#include <ATen/ATen.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

#include "stitch/transport/error.h"

namespace stitch::optim {

namespace {

[[noreturn]] void refuse(const std::string& file, const std::string& why) {
  throw Error(ErrorCode::invalid_argument, "optimizer checkpoint " + file + ' ' + why);
}

std::string shape_text(at::IntArrayRef sizes) {
  std::ostringstream text;
  text << sizes;
  return text.str();
}

}  // namespace

void CheckpointWriter::add(std::size_t position, const at::Tensor& parameter,
                           const torch::optim::Optimizer& optimizer) {
  torch::serialize::OutputArchive entry;
  entry.write("shape", at::tensor(parameter.sizes(), at::kLong));
  // As bytes, now: an archive shares its tensors' memory, which the next step would change.
  torch::serialize::OutputArchive state;
  optimizer.save(state);
  std::ostringstream bytes;
  state.save_to(bytes);
  std::string text = bytes.str();
  entry.write(
      "optimizer",
      at::from_blob(text.data(), {static_cast<std::int64_t>(text.size())}, at::kByte).clone());
  archive_.write("parameter" + std::to_string(position), entry);
  ++count_;
}

void CheckpointWriter::write(const std::string& file) {
  archive_.write("count", at::scalar_tensor(count_, at::kLong));
  std::error_code ignored;
  std::filesystem::create_directories(std::filesystem::path(file).parent_path(), ignored);
  static std::atomic<unsigned> written{
      0};  // two savers of one file do not meet in the unfinished one
  const std::string unfinished = file + ".part" + std::to_string(written.fetch_add(1));
  std::ofstream out(unfinished, std::ios::binary);
  if (!out) refuse(file, "cannot be written");
  archive_.save_to(out);
  out.close();
  if (!out) refuse(file, "cannot be written completely");
  std::error_code error;
  std::filesystem::rename(unfinished, file, error);
  if (error) refuse(file, "cannot be put in place: " + error.message());
}

CheckpointReader::CheckpointReader(const std::string& file, std::size_t parameters) : file_(file) {
  std::ifstream in(file, std::ios::binary);
  if (!in) refuse(file, "is not there or cannot be read");
  at::Tensor count;
  try {
    archive_.load_from(in);
    archive_.read("count", count);
  } catch (const c10::Error& error) {
    refuse(file, std::string("is damaged or of another kind: ") + error.what_without_backtrace());
  }
  if (count.item<std::int64_t>() != static_cast<std::int64_t>(parameters)) {
    refuse(file, "is for " + std::to_string(count.item<std::int64_t>()) +
                     " parameters, this optimizer has " + std::to_string(parameters));
  }
}

void CheckpointReader::check(std::size_t position, const at::Tensor& parameter) {
  torch::serialize::InputArchive entry;
  at::Tensor shape;
  archive_.read("parameter" + std::to_string(position), entry);
  entry.read("shape", shape);
  const at::IntArrayRef saved(shape.data_ptr<std::int64_t>(),
                              static_cast<std::size_t>(shape.numel()));
  if (saved != parameter.sizes()) {
    refuse(file_, "has shape " + shape_text(saved) + " for parameter " + std::to_string(position) +
                      ", it is " + shape_text(parameter.sizes()));
  }
}

void CheckpointReader::read(std::size_t position, torch::optim::Optimizer& optimizer) {
  torch::serialize::InputArchive entry;
  archive_.read("parameter" + std::to_string(position), entry);
  at::Tensor bytes;
  entry.read("optimizer", bytes);
  std::istringstream in(std::string(static_cast<const char*>(bytes.data_ptr()),
                                    static_cast<std::size_t>(bytes.numel())));
  torch::serialize::InputArchive state;
  state.load_from(in);
  optimizer.load(state);
}

}  // namespace stitch::optim
