#include "stitch/rpc/options/option_name.h"

#include <cctype>
#include <set>

namespace stitch::rpc {

namespace {
thread_local std::set<std::string> variables_read;
}  // namespace

std::string option_name(const std::string& field) {
  std::string variable = "STITCH_";
  for (const char c : field)
    variable += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return variables_read.contains(variable) ? variable : field;
}

void note_set_by_variable(const std::string& variable) { variables_read.insert(variable); }

void forget_set_by_variables() { variables_read.clear(); }

}  // namespace stitch::rpc
