#include "stitch/rpc/function/function_traits.h"

#include "stitch/base/demangle.h"

namespace stitch::rpc {

std::uint64_t function_id(std::string_view name) {
  std::uint64_t hash = 14695981039346656037ull;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return hash == 0 ? 1 : hash;
}

// "stitch::rpc::FunctionTag<&(ps::embed(at::Tensor))>" -> "ps::embed"; a lambda keeps its place:
// "main::{lambda(int)#1}".
std::string function_display_name(const std::type_info& tag) {
  std::string name = base::demangle(tag.name());
  const auto open = name.find("FunctionTag<");
  if (open == std::string::npos || name.back() != '>') return name;
  name = name.substr(open + 12, name.size() - open - 13);
  while (!name.empty() && name.back() == ' ') name.pop_back();
  if (name.starts_with("&(") && name.back() == ')') name = name.substr(2, name.size() - 3);
  if (name.starts_with("&")) name = name.substr(1);
  if (name.ends_with("{}")) name.resize(name.size() - 2);
  if (name.find("{lambda(") != std::string::npos || name.find("'lambda") != std::string::npos)
    return name;
  // Drop the parameter list: the first '(' outside template brackets; "(anonymous namespace)" is
  // not one.
  int depth = 0;
  for (std::size_t i = 0; i < name.size(); ++i) {
    if (name[i] == '<') ++depth;
    if (name[i] == '>') --depth;
    if (name[i] == '(' && depth == 0 && name.compare(i, 21, "(anonymous namespace)") != 0) {
      name.resize(i);
      break;
    }
  }
  // A template's instance starts with its return type: "int twice<int>".
  depth = 0;
  std::size_t start = 0;
  for (std::size_t i = 0; i < name.size(); ++i) {
    if (name[i] == '<' || name[i] == '(') ++depth;
    if (name[i] == '>' || name[i] == ')') --depth;
    if (name[i] == ' ' && depth == 0) start = i + 1;
  }
  return name.substr(start);
}

}  // namespace stitch::rpc
