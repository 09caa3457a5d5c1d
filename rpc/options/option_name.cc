#include "stitch/rpc/options/option_name.h"

#include <cctype>
#include <map>
#include <string_view>

namespace stitch::rpc {

namespace {
thread_local std::map<std::string, std::string> variables_read;  // by field
}  // namespace

std::string option_name(const std::string& field) {
  const auto found = variables_read.find(field);
  return found == variables_read.end() ? field : found->second;
}

void note_set_by_variable(const std::string& variable) {
  std::string field;
  for (const char c : variable.substr(std::string_view("STITCH_").size()))
    field += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  note_set_by_variable(variable, field);
}

void note_set_by_variable(const std::string& variable, const std::string& field) {
  variables_read.insert_or_assign(field, variable);
}

void forget_set_by_variables() { variables_read.clear(); }

}  // namespace stitch::rpc
