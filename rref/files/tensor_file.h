#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <string>

// Files of named tensors that other programs read and write, too (docs/files.md). The ending of the
// path names the format:
//   .safetensors  of the library of that name
//   .pt           of Python's torch.save of a dict of tensors, which its torch.load(weights_only=
//                 True) reads
// No code of a file is run. Errors are Error(invalid_argument), and begin with the path. Thread
// contract: any thread.
namespace stitch {

// Writes the tensors, whole or not at all: a new file takes the place of the old one when it is
// complete and on the disk. Only its user may read it. A tensor is dense, on any device; it is
// written with its values alone, in row-major order, so that tensors that share memory are apart
// in the file. None of them may be changed meanwhile. A process that dies may leave
// "<path>.<number>.part".
void save(const std::filesystem::path& path, const std::map<std::string, at::Tensor>& tensors);

// The tensors of a file, on the CPU; they do not require grad. The file is mapped: its bytes are
// read as they are used, all of the mapping stays while any of the tensors does, and writing to
// them does not change the file. REQUIRES: no program changes or shortens the file meanwhile;
// save() does neither.
//
// Of a .pt file, tensors share memory as they did when they were saved. In nested dicts, lists and
// tuples a name is the way to the tensor, joined by '.' ("model.layer.weight"); values of other
// types are left out.
[[nodiscard]] std::map<std::string, at::Tensor> load(const std::filesystem::path& path);

}  // namespace stitch
