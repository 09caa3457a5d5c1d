#pragma once

#include <string_view>

// A .pt file is a zip file (zip_file.h) with a pickle of the values ("data.pkl"), in which storages
// are numbers, and the bytes of these ("data/0", ...). Names and instructions for its reader and
// its writer. Internal.
namespace stitch::files {

// Names as they stand in a pickle: "<module>\n<name>".
inline constexpr std::string_view kOrderedDict = "collections\nOrderedDict";
inline constexpr std::string_view kRebuildTensor = "torch._utils\n_rebuild_tensor_v2";
inline constexpr std::string_view kRebuildNewerTensor = "torch._utils\n_rebuild_tensor_v3";
inline constexpr std::string_view kRebuildParameter = "torch._utils\n_rebuild_parameter";
inline constexpr std::string_view kUntypedStorage = "torch.storage\nUntypedStorage";
inline constexpr std::string_view kTorch = "torch\n";
inline constexpr std::string_view kStorage = "Storage";

// Instructions, of protocol 2.
enum Op : unsigned char {
  kMark = '(',
  kStop = '.',
  kInt4 = 'J',
  kInt1 = 'K',
  kInt2 = 'M',
  kNone = 'N',
  kPersistent = 'Q',
  kReduce = 'R',
  kText = 'X',
  kAppend = 'a',
  kBuild = 'b',
  kGlobal = 'c',
  kAppends = 'e',
  kGet1 = 'h',
  kGet4 = 'j',
  kPut1 = 'q',
  kPut4 = 'r',
  kSetItem = 's',
  kTuple = 't',
  kSetItems = 'u',
  kEmptyDict = '}',
  kEmptyList = ']',
  kEmptyTuple = ')',
  kFloat = 'G',
  kProtocol = 0x80,
  kTuple1 = 0x85,
  kTuple2,
  kTuple3,
  kTrue,
  kFalse,
  kLong = 0x8a,
};

}  // namespace stitch::files
