// A naive fp64 forward pass of qwen3_5 models and their MTP heads, written from the formulas.
#pragma once

#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "support/engine_harness.h"
#include "support/qwen3_5_model.h"

namespace replayssm::testing {

using Doubles = std::vector<double>;
using DoubleRows = std::vector<Doubles>;

/// The whole text anew for every question, token by token and head by head.
class Qwen35Oracle {
 public:
  Qwen35Oracle(const Qwen35Sizes& sizes, const StoredTensors& tensors, std::string body = "model.")
      : s_(sizes), body_(std::move(body)) {
    for (const StoredTensor& tensor : tensors) {
      Doubles& values = weights_[tensor.name];
      for (std::size_t i = 0; i < tensor.count(); ++i) values.push_back(tensor.at(i));
    }
  }

  /// After the final norm, of every token.
  DoubleRows hidden(const Tokens& tokens) const {
    DoubleRows x;
    for (const std::int32_t token : tokens) x.push_back(embedding(token));
    for (std::size_t i = 0; i < s_.attention.size(); ++i) {
      layer(body_ + "layers." + std::to_string(i) + ".", s_.attention[i], x);
    }
    for (Doubles& row : x) row = norm(row, body_ + "norm.weight");
    return x;
  }

  Doubles logits(const Doubles& hidden) const {
    return multiply(
        weights_.contains("lm_head.weight") ? "lm_head.weight" : body_ + "embed_tokens.weight",
        hidden);
  }

  /// The head's outputs for pairs (hidden[i], tokens[i]), the token after hidden[i]'s.
  DoubleRows mtp(const DoubleRows& hidden, const Tokens& tokens) const {
    DoubleRows x;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      Doubles pair = norm(embedding(tokens[i]), "mtp.pre_fc_norm_embedding.weight");
      const Doubles h = norm(hidden[i], "mtp.pre_fc_norm_hidden.weight");
      pair.insert(pair.end(), h.begin(), h.end());
      x.push_back(multiply("mtp.fc.weight", pair));
    }
    layer("mtp.layers.0.", true, x);
    for (Doubles& row : x) row = norm(row, "mtp.norm.weight");
    return x;
  }

 private:
  static double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
  static double silu(double x) { return x * sigmoid(x); }
  static std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

  const Doubles& weight(const std::string& name) const { return weights_.at(name); }

  Doubles embedding(std::int32_t token) const {
    const Doubles& table = weight(body_ + "embed_tokens.weight");
    const auto begin = table.begin() + token * s_.hidden;
    return {begin, begin + s_.hidden};
  }

  Doubles multiply(const std::string& name, const Doubles& x) const {
    const Doubles& w = weight(name);
    Doubles y(w.size() / x.size());
    for (std::size_t o = 0; o < y.size(); ++o) {
      for (std::size_t i = 0; i < x.size(); ++i) y[o] += w[o * x.size() + i] * x[i];
    }
    return y;
  }

  /// RMSNorm; weights are stored less `centre`.
  Doubles norm(Doubles x, const std::string& name, double centre = 1.0) const {
    double sum = 0;
    for (const double v : x) sum += v * v;
    const double scale = 1.0 / std::sqrt(sum / static_cast<double>(x.size()) + kQwen35Eps);
    const Doubles& w = weight(name);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] *= scale * (centre + w[i]);
    return x;
  }

  static Doubles slice(const Doubles& x, std::int64_t begin, std::int64_t count) {
    return {x.begin() + begin, x.begin() + begin + count};
  }

  void layer(const std::string& name, bool attention, DoubleRows& x) const {
    DoubleRows in;
    for (const Doubles& row : x) in.push_back(norm(row, name + "input_layernorm.weight"));
    const DoubleRows mixed =
        attention ? attend(name + "self_attn.", in) : delta_net(name + "linear_attn.", in);
    for (std::size_t t = 0; t < x.size(); ++t) {
      for (std::size_t i = 0; i < x[t].size(); ++i) x[t][i] += mixed[t][i];
      const Doubles u = norm(x[t], name + "post_attention_layernorm.weight");
      const Doubles gate = multiply(name + "mlp.gate_proj.weight", u);
      Doubles up = multiply(name + "mlp.up_proj.weight", u);
      for (std::size_t i = 0; i < up.size(); ++i) up[i] *= silu(gate[i]);
      const Doubles down = multiply(name + "mlp.down_proj.weight", up);
      for (std::size_t i = 0; i < x[t].size(); ++i) x[t][i] += down[i];
    }
  }

  /// Pairs (j, j + n / 2) of the first n features, turned by position * theta^(-2j / n).
  Doubles rotated(Doubles x, std::size_t position) const {
    const std::size_t half = index(s_.rotary_dim / 2);
    for (std::size_t j = 0; j < half; ++j) {
      const double angle =
          static_cast<double>(position) *
          std::pow(kQwen35Theta, -2.0 * static_cast<double>(j) / static_cast<double>(2 * half));
      const double a = x[j];
      const double b = x[j + half];
      x[j] = a * std::cos(angle) - b * std::sin(angle);
      x[j + half] = b * std::cos(angle) + a * std::sin(angle);
    }
    return x;
  }

  DoubleRows attend(const std::string& name, const DoubleRows& in) const {
    const std::int64_t d = s_.head_dim;
    std::vector<DoubleRows> keys(in.size());  // by position and KV head
    std::vector<DoubleRows> values(in.size());
    DoubleRows out;
    for (std::size_t t = 0; t < in.size(); ++t) {
      const Doubles q_gate = multiply(name + "q_proj.weight", in[t]);
      const Doubles k = multiply(name + "k_proj.weight", in[t]);
      const Doubles v = multiply(name + "v_proj.weight", in[t]);
      for (std::int64_t h = 0; h < s_.kv_heads; ++h) {
        keys[t].push_back(rotated(norm(slice(k, h * d, d), name + "k_norm.weight"), t));
        values[t].push_back(slice(v, h * d, d));
      }
      Doubles context;
      for (std::int64_t h = 0; h < s_.query_heads; ++h) {
        const Doubles q = rotated(norm(slice(q_gate, 2 * h * d, d), name + "q_norm.weight"), t);
        const std::size_t kv = index(h / (s_.query_heads / s_.kv_heads));
        Doubles weights;
        double total = 0;
        for (std::size_t j = 0; j <= t; ++j) {
          double dot = 0;
          for (std::size_t i = 0; i < q.size(); ++i) dot += q[i] * keys[j][kv][i];
          weights.push_back(std::exp(dot / std::sqrt(static_cast<double>(d))));
          total += weights.back();
        }
        for (std::int64_t i = 0; i < d; ++i) {
          double sum = 0;
          for (std::size_t j = 0; j <= t; ++j) sum += weights[j] / total * values[j][kv][index(i)];
          context.push_back(sum * sigmoid(q_gate[index((2 * h + 1) * d + i)]));
        }
      }
      out.push_back(multiply(name + "o_proj.weight", context));
    }
    return out;
  }

  DoubleRows delta_net(const std::string& name, const DoubleRows& in) const {
    const std::int64_t keys = s_.keys();
    const std::int64_t group = s_.value_heads / s_.key_heads;
    const auto unit = [](Doubles x) {
      double sum = 1e-6;
      for (const double v : x) sum += v * v;
      for (double& v : x) v /= std::sqrt(sum);
      return x;
    };
    DoubleRows inputs;
    DoubleRows out;
    std::vector<Doubles> states(index(s_.value_heads), Doubles(index(s_.key_dim * s_.value_dim)));
    for (std::size_t t = 0; t < in.size(); ++t) {
      inputs.push_back(multiply(name + "in_proj_qkv.weight", in[t]));
      const Doubles& taps = weight(name + "conv1d.weight");
      Doubles qkv(index(s_.conv_channels()));
      for (std::size_t c = 0; c < qkv.size(); ++c) {
        for (std::size_t w = 0; w < index(kQwen35ConvWidth) && w <= t; ++w) {
          qkv[c] += taps[(c + 1) * index(kQwen35ConvWidth) - 1 - w] * inputs[t - w][c];
        }
        qkv[c] = silu(qkv[c]);
      }
      const Doubles z = multiply(name + "in_proj_z.weight", in[t]);
      const Doubles a = multiply(name + "in_proj_a.weight", in[t]);
      const Doubles b = multiply(name + "in_proj_b.weight", in[t]);
      Doubles gated;
      for (std::int64_t h = 0; h < s_.value_heads; ++h) {
        const std::int64_t kh = h / group;
        const Doubles q = unit(slice(qkv, kh * s_.key_dim, s_.key_dim));
        const Doubles k = unit(slice(qkv, keys + kh * s_.key_dim, s_.key_dim));
        const Doubles v = slice(qkv, 2 * keys + h * s_.value_dim, s_.value_dim);
        const std::size_t i = index(h);
        const double decay = std::exp(-std::exp(weight(name + "A_log")[i]) *
                                      std::log1p(std::exp(a[i] + weight(name + "dt_bias")[i])));
        Doubles o = recur(states[i], q, k, v, decay, sigmoid(b[i]));
        for (double& value : o) value /= std::sqrt(static_cast<double>(s_.key_dim));
        o = norm(std::move(o), name + "norm.weight", 0.0);
        for (std::int64_t c = 0; c < s_.value_dim; ++c) {
          gated.push_back(o[index(c)] * silu(z[index(h * s_.value_dim + c)]));
        }
      }
      out.push_back(multiply(name + "out_proj.weight", gated));
    }
    return out;
  }

  /// state (key_dim, value_dim), moved on by a token; what q reads of it then.
  static Doubles recur(Doubles& state, const Doubles& q, const Doubles& k, const Doubles& v,
                       double decay, double beta) {
    const std::size_t columns = v.size();
    for (double& value : state) value *= decay;
    Doubles out(columns);
    for (std::size_t c = 0; c < columns; ++c) {
      double known = 0;
      for (std::size_t r = 0; r < k.size(); ++r) known += state[r * columns + c] * k[r];
      const double delta = beta * (v[c] - known);
      for (std::size_t r = 0; r < k.size(); ++r) {
        state[r * columns + c] += k[r] * delta;
        out[c] += state[r * columns + c] * q[r];
      }
    }
    return out;
  }

  Qwen35Sizes s_;
  std::string body_;
  std::map<std::string, Doubles> weights_;
};

}  // namespace replayssm::testing
