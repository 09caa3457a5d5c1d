#include "tests/peer/scenario.h"

#include <fstream>

#include "tests/support/world_test.h"

namespace stitch::testing {

namespace {

using Tensors = std::vector<at::Tensor>;

// A word, or a list; with the text it was read from, which can be sent.
struct Tree {
  std::string text;
  std::vector<Tree> list;
};

// Reads one tree from `text`, starting at `at`, which is moved behind it.
Tree parse(const std::string& text, std::size_t& at) {
  at = text.find_first_not_of(' ', at);
  if (at == std::string::npos) throw std::runtime_error("an expression ends too early: " + text);
  const std::size_t start = at;
  Tree tree;
  if (text[at] != '(') {
    at = std::min(text.find_first_of(" ()", at), text.size());
  } else {
    ++at;
    for (;;) {
      at = text.find_first_not_of(' ', at);
      if (at == std::string::npos) throw std::runtime_error("a parenthesis is open: " + text);
      if (text[at] == ')') break;
      tree.list.push_back(parse(text, at));
    }
    ++at;
  }
  tree.text = text.substr(start, at - start);
  return tree;
}

Tensors run_body(std::string body, Tensors arguments) { return evaluate(body, arguments); }

Tensors values_of(const Tree& tree, const Tensors& arguments);

// Those of the parts of a list, from the `first` on.
Tensors values_from(const Tree& tree, std::size_t first, const Tensors& arguments) {
  Tensors all;
  for (std::size_t i = first; i < tree.list.size(); ++i) {
    const Tensors some = values_of(tree.list[i], arguments);
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

at::Tensor operation(const std::string& name, const Tensors& values) {
  static const std::map<std::string, std::function<at::Tensor(const Tensors&)>> kOperations{
      {"add", [](const Tensors& v) { return v[0] + v[1]; }},
      {"mul", [](const Tensors& v) { return v[0] * v[1]; }},
      {"sin", [](const Tensors& v) { return v[0].sin(); }},
      {"exp", [](const Tensors& v) { return v[0].exp(); }},
      {"sum", [](const Tensors& v) { return v[0].sum(); }},
      {"float", [](const Tensors& v) { return v[0].to(at::kFloat); }},
      {"double", [](const Tensors& v) { return v[0].to(at::kDouble); }},
      {"const", [](const Tensors& v) { return v[0].detach(); }}};
  return kOperations.at(name)(values);
}

Tensors values_of(const Tree& tree, const Tensors& arguments) {
  if (tree.list.empty()) return {arguments.at(std::stoul(tree.text.substr(1)))};
  const std::string& name = tree.list[0].text;
  const auto& leaves = leaves_of(rpc::current_agent()->self().id.value());
  if (name == "call" || name == "remote") {
    const std::string to = "worker" + tree.list[1].text;
    const Tensors sent = values_from(tree, 3, arguments);
    if (name == "call") return rpc_sync<run_body>(to, tree.list[2].text, sent);
    return remote<run_body>(to, tree.list[2].text, sent).to_here();
  }
  if (name == "rows") {
    std::vector<std::int64_t> rows;
    for (std::size_t i = 1; i < tree.list.size(); ++i) rows.push_back(std::stol(tree.list[i].text));
    return {at::embedding(leaves.at("table"), at::tensor(rows), -1, false, /*sparse=*/true)};
  }
  if (name == "nth") return {values_of(tree.list[2], arguments).at(std::stoul(tree.list[1].text))};
  if (tree.list.size() == 1) return {leaves.at(name)};
  const Tensors values = values_from(tree, 1, arguments);
  return name == "list" ? values : Tensors{operation(name, values)};
}

}  // namespace

std::vector<Scenario> read_scenarios(const std::filesystem::path& file) {
  std::ifstream lines(file);
  std::vector<Scenario> all;
  for (std::string line; std::getline(lines, line);) {
    const auto colon = line.find(':');
    if (line.empty() || line[0] == '#' || colon == std::string::npos) continue;
    std::size_t used = 0;
    const int passes = std::stoi(line.substr(colon + 1), &used);
    all.push_back({line.substr(0, colon), passes, line.substr(colon + 1 + used)});
  }
  return all;
}

Tensors evaluate(const std::string& expression, const Tensors& arguments) {
  std::size_t at = 0;
  return values_of(parse(expression, at), arguments);
}

const std::map<std::string, at::Tensor>& leaves_of(std::uint32_t worker) {
  static std::mutex mutex;
  static std::map<std::uint32_t, std::map<std::string, at::Tensor>> all;
  const std::lock_guard lock(mutex);
  auto& leaves = all[worker];
  if (!leaves.empty()) return leaves;
  const auto scale = static_cast<double>(worker + 1);
  leaves["p"] = (at::tensor({0.1, 0.2, 0.3}, at::kDouble) * scale).requires_grad_();
  leaves["table"] = (at::arange(12, at::kDouble).view({4, 3}) * (0.1 * scale)).requires_grad_();
  if (worker == 0) {
    leaves["x"] = at::tensor({1.0, 2.0, 3.0}, at::kDouble).requires_grad_();
    leaves["y"] = at::tensor({0.5, -1.0, 2.0}, at::kDouble).requires_grad_();
  }
  return leaves;
}

}  // namespace stitch::testing
