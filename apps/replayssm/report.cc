#include "report.h"

#include <fmt/core.h>

#include <cstdio>

namespace replayssm::app {

Json run_json(const Session& session, const Run& run, const std::string& text) {
  const TrafficPerToken traffic = traffic_per_token(run.generation);
  Json json;
  json["tokens"] = run.generation.tokens;
  json["text"] = text;
  json["prompt_tokens"] = run.generation.prompt_tokens;
  json["decode"] = decode_name(run);
  json["requested"] = to_string(run.decode);
  json["reason"] = run.plan.reason;
  json["window"] = run.plan.window;
  json["state"] = to_string(run.state);
  const DecodeCounts& counts = run.generation.decode;
  json["draft"] = {{"source", run.draft},       {"tokens", run.draft_tokens},
                   {"drafted", counts.drafted}, {"accepted", counts.accepted},
                   {"steps", counts.steps},     {"acceptance", nullptr}};
  if (counts.drafted > 0) json["draft"]["acceptance"] = acceptance(run);
  json["state_memory"] = {{"states", run.bytes.states},
                          {"bytes", run.bytes.states * run.bytes.state.total}};
  json["restored_tokens"] = run.restored_tokens;
  json["isa"] = to_string(session.context.isa);
  json["threads"] = session.context.thread_count();
  json["seconds"] = {{"load", session.load_seconds},
                     {"prompt", run.generation.prompt_seconds},
                     {"decode", run.generation.decode_seconds}};
  json["tokens_per_second"] = tokens_per_second(run.generation);
  json["state_bytes_per_token"] = {{"read", traffic.read},
                                   {"written", traffic.written},
                                   {"checkpoint_written", traffic.checkpoint_written}};
  return json;
}

void print_json(const Json& json) {
  // Text may end inside a character where a stop cut it; JSON must stay valid.
  const std::string line = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  std::fwrite(line.data(), 1, line.size(), stdout);
  std::fputc('\n', stdout);
}

std::string bytes_text(double bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < std::size(units)) {
    bytes /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.1f} {}", bytes, units[unit]);
}

const char* decode_name(const Run& run) {
  if (run.decode == DecodeMode::kSnapshot) return "snapshot";
  return run.plan.replay ? "replay" : "plain";
}

double acceptance(const Run& run) {
  const DecodeCounts& counts = run.generation.decode;
  return counts.drafted > 0
             ? static_cast<double>(counts.accepted) / static_cast<double>(counts.drafted)
             : 0.0;
}

std::string decode_text(const Run& run) {
  std::string how = decode_name(run);
  if (run.plan.replay) how += fmt::format(" {}", run.plan.window);
  if (run.decode == DecodeMode::kAuto) how = "auto (" + how + ")";
  if (run.draft == "none") return how;
  // Of a folder, its last name.
  const std::string name = run.draft.substr(0, run.draft.find_last_not_of('/') + 1);
  return how + fmt::format(" + {} {}", name.substr(name.rfind('/') + 1), run.draft_tokens);
}

}  // namespace replayssm::app
