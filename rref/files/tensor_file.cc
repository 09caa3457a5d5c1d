#include "stitch/rref/files/tensor_file.h"

#include "stitch/rref/files/disk_file.h"
#include "stitch/rref/files/file_tensors.h"

namespace stitch {

namespace fs = std::filesystem;

namespace {

bool is_pt(const fs::path& path) {
  // The system would take what stands before it for the name.
  if (path.native().find('\0') != std::string::npos) files::refuse("its path has a NUL");
  const auto ending = path.extension();
  if (ending != ".pt" && ending != ".safetensors")
    files::refuse("its ending is neither .safetensors nor .pt");
  return ending == ".pt";
}

}  // namespace

void save(const fs::path& path, const std::map<std::string, at::Tensor>& tensors) {
  files::about(path, [&] {
    const bool pt = is_pt(path);
    files::expect_writable(tensors);
    files::NewFile file(path);
    const files::Sink out = [&](const void* data, std::size_t size) { file.write(data, size); };
    pt ? files::write_pt(tensors, out) : files::write_safetensors(tensors, out);
    file.publish();
  });
}

std::map<std::string, at::Tensor> load(const fs::path& path) {
  return files::about(path, [&] {
    const bool pt = is_pt(path);
    const files::FileBytes file = files::map_file(path);
    return pt ? files::read_pt(file) : files::read_safetensors(file);
  });
}

}  // namespace stitch
