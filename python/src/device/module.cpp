// SPDX-License-Identifier: Apache-2.0
// Ranks on devices in Python: NCCL communicators, whose operators take tensors by DLPack's exchange of C.
#include "../comm.hpp"
#include "../numbers.hpp"
#include "tensor.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <mutex>
#include <optional>
#include <unordered_map>

using namespace nanobind::literals;

namespace binding {

namespace {

/// A framework whose tensors speak DLPack's exchange of C. Lives as long as the process, as its table does.
class dlpack_framework final : public framework {
public:
    explicit dlpack_framework(dlpack::exchange const& by) : by_(by) {}

    void* allocate(int device, std::size_t bytes) override {
        auto count = static_cast<std::int64_t>(bytes);
        dlpack::tensor wanted{};
        wanted.where = {dlpack::cuda_device, device};
        wanted.dimensions = 1;
        wanted.type = {static_cast<std::uint8_t>(number_kind::natural), 8, 1};
        wanted.shape = &count;
        dlpack::managed_tensor* made = nullptr;
        std::string problem;
        auto const refuse = [](void* to, char const*, char const* why) { *static_cast<std::string*>(to) = why; };
        if (by_.allocate(&wanted, &made, &problem, refuse) != 0)
            throw cpx::error("cuda", "memory of the framework", std::to_string(bytes) + " bytes", problem);
        std::lock_guard const lock(guard_);
        given_[made->of.data] = made;
        return made->of.data;
    }
    void release(void* memory) noexcept override {
        dlpack::managed_tensor* made = nullptr;
        {
            std::lock_guard const lock(guard_);
            auto const found = given_.find(memory);
            made = found->second;
            given_.erase(found);
        }
        if (made->release) made->release(made);
    }
    void* stream(int device) override {
        void* current = nullptr;
        cpx::require(by_.current_stream(dlpack::cuda_device, device, &current) == 0, "cuda", "current stream", "one",
                     "none");
        return current;
    }
    dlpack::exchange const& by() const { return by_; }

private:
    dlpack::exchange const& by_;
    std::mutex guard_;
    std::unordered_map<void*, dlpack::managed_tensor*> given_;
};

/// Returns the framework of a type of tensors, or null.
dlpack_framework* framework_of(nb::handle type) {
    static auto& known = *new std::unordered_map<dlpack::exchange const*, dlpack_framework*>; // with the GIL held
    auto const* const by = exchange_of(type);
    if (!by) return nullptr;
    auto& found = known[by];
    if (!found) found = new dlpack_framework(*by);
    return found;
}

/// Returns how errors name a device: "cpu", "cuda:1".
std::string device_name(dlpack::device const& d) {
    if (d.type == dlpack::cuda_device) return "cuda:" + std::to_string(d.id);
    return d.type == 1 || d.type == 3 ? "cpu" : "device type " + std::to_string(d.type);
}

/// Reads the tensors of one call, all of which are of one device.
class reader {
public:
    reader(char const* where, int device) : where_(where), device_(device) {}

    tensor operator()(char const* name, nb::handle object) const {
        tensor t{where_, name};
        auto* const from = framework_of(object.type());
        dlpack::tensor found{};
        if (!from || from->by().describe(object.ptr(), &found) != 0) {
            PyErr_Clear();
            throw cpx::error(where_, name, "a tensor of torch 2.10 or newer",
                             nb::cast<std::string>(object.type().attr("__name__")));
        }
        if (found.where.type != dlpack::cuda_device || found.where.id != device_)
            throw cpx::error(where_, std::string("device of ") + name, device_name({dlpack::cuda_device, device_}),
                             device_name(found.where));
        t.given = true;
        t.data = static_cast<char*>(found.data) + found.byte_offset;
        t.kind = found.type.code, t.bits = found.type.bits, t.count = found.dimensions;
        auto const most = static_cast<index_t>(t.sizes.size());
        cpx::require(t.count <= most && found.type.lanes == 1, where_, "dimensions of a tensor", most, t.count);
        index_t dense = 1;
        for (std::int32_t i = found.dimensions; i-- > 0;) {
            auto const at = static_cast<std::size_t>(i);
            t.sizes[at] = found.shape[i];
            t.strides[at] = found.strides ? found.strides[i] : dense;
            dense *= found.shape[i];
        }
        return t;
    }
    /// The same; None is none.
    tensor if_given(char const* name, nb::handle object) const {
        if (object.is_none()) return {where_, name};
        return (*this)(name, object);
    }

private:
    char const* where_;
    int device_;
};

/// A rank of an NCCL communicator.
class nccl_rank final : public communicator, device_operators {
public:
    nccl_rank(group_pointer group, int device) : group_(std::move(group)), device_(device) {}
    ~nccl_rank() override {
        pool_.reset();
        nb::gil_scoped_release const free; // it may wait for the device
        group_.reset();
    }

    int rank() const override { return rank_of(*group_); }
    int ranks() const override { return ranks_of(*group_); }
    std::string device() const override { return "cuda:" + std::to_string(device_); }
    cpx::transport_ref host(char const* where) override {
        throw cpx::error(where, "communicator", "one of ranks on the host, whose tensors this operator takes",
                         "one on " + device());
    }
    device_operators* on_device() override { return this; }
    void leave() override {
        pool_ = nb::none(); // which gives the window back what no tensor has
        call const now("leave", *this);
        binding::leave(*group_);
    }
    void fail(std::string const& why) override { binding::fail(*group_, why.c_str()); }
    index_t kept_chunk() { return kept_on(*group_); }
    std::string exchange_path() const {
        auto const path = path_of(*group_);
        return path == binding::exchange_path::undecided ? "undecided"
               : path == binding::exchange_path::window  ? "window"
                                                         : "messages";
    }
    index_t room() const { return room_of(*group_); }
    void lend(bool on) { binding::lend(*group_, on); }
    bool holds(std::uintptr_t memory) const { return binding::holds(*group_, reinterpret_cast<void const*>(memory)); }
    nb::object pool() const { return pool_; }
    void set_pool(nb::object pool) { pool_ = std::move(pool); }
    void wait() {
        call const now("wait", *this);
        wait_for(there());
    }

    void exchange(relayout_value const& plan, nb::handle source, nb::handle target) override {
        reader const read("exchange", device_);
        tensor const x = read("x", source), y = read("out", target);
        call const now("exchange", *this);
        exchange_on(there(), plan, x, y);
    }
    void shift(halo_value const& plan, nb::handle source, nb::handle target, fill_value const& fill) override {
        char const* const where = "shift_rows";
        reader const read(where, device_);
        tensor const x = read("x", source), y = read("out", target);
        call const now(where, *this);
        shift_on(there(), plan, x, y, fill);
    }
    void sum(nb::handle values_) override {
        char const* const where = "sum_over_ranks";
        tensor const values = reader(where, device_)("values", values_);
        call const now(where, *this);
        sum_on(there(), values);
    }
    void convolve(halo_value const& before, convolution_objects const& o, cpx::activation act) override {
        char const* const where = "causal_conv1d";
        cpx::require(o.initial.is_none() && o.final.is_none(), where, "states", "none, on devices", "some");
        reader const read(where, device_);
        convolution_call c;
        c.x = read("x", o.x), c.weight = read("weight", o.weight), c.bias = read.if_given("bias", o.bias);
        c.y = read("out", o.y), c.act = act;
        call const now(where, *this);
        convolve_on(there(), before, c);
    }
    void convolve_backward(halo_value const& before, halo_value const& after, convolution_objects const& o,
                           cpx::activation act) override {
        char const* const where = "causal_conv1d_backward";
        reader const read(where, device_);
        convolution_call c;
        c.x = read("x", o.x), c.weight = read("weight", o.weight), c.bias = read.if_given("bias", o.bias);
        c.dy = read("dy", o.dy), c.dx = read("dx", o.dx), c.dweight = read.if_given("dweight", o.dweight);
        c.dbias = read.if_given("dbias", o.dbias), c.act = act;
        call const now(where, *this);
        convolve_backward_on(there(), before, after, c);
    }
    void recur(std::string_view name, bool back, carry_value const& plan, recurrence_objects const& o) override {
        std::string const text = std::string(name) + (back ? "_backward" : "");
        char const* const where = text.c_str();
        bool const erases = name == "gated_delta_rule";
        cpx::require(erases || name == "head_decay_attention", where, "recurrence on devices",
                     "gated_delta_rule or head_decay_attention", text);
        reader const read(where, device_);
        constexpr std::array names{"q", "k", "v", "g", "beta"}, of_gradients{"dq", "dk", "dv", "dg", "dbeta"};
        std::size_t const inputs = erases ? 5 : 4;
        cpx::require(o.x.size() == inputs, where, "inputs", inputs, o.x.size());
        state_call c;
        c.where = where;
        c.key_heads = o.heads[0], c.value_heads = o.heads[1], c.key_dim = o.heads[2], c.value_dim = o.heads[3];
        c.chunk = o.chunk, c.qk_l2norm = o.qk_l2norm, c.scale = o.scale;
        c.x.reserve(inputs), c.dx.reserve(inputs);
        for (std::size_t i = 0; i < inputs; ++i) c.x.push_back(read(names[i], o.x[i]));
        c.starts = read.if_given("saved states", o.starts), c.maps = read.if_given("saved maps", o.maps);
        if (back) {
            cpx::require(o.dx.size() == inputs, where, "gradients of inputs", inputs, o.dx.size());
            for (std::size_t i = 0; i < inputs; ++i) c.dx.push_back(read(of_gradients[i], o.dx[i]));
            c.dout = read("dout", o.o), c.dfinal = read.if_given("dfinal", o.final);
            c.dinitial = read.if_given("dinitial", o.initial);
        } else {
            c.o = read("out", o.o), c.initial = read.if_given("initial", o.initial);
            c.final = read.if_given("final", o.final);
        }
        call const now(where, *this);
        recur_on(there(), plan, c, back);
    }
    void attend(attention_objects const& o, bool back) override {
        char const* const where = back ? "attention_backward" : "attention";
        reader const read(where, device_);
        attention_call c;
        c.queries = &o.queries, c.keys = &o.keys, c.scale = o.scale;
        c.query_heads = o.heads[0], c.key_heads = o.heads[1], c.dim = o.heads[2];
        c.q = read("q", o.q), c.k = read("k", o.k), c.v = read("v", o.v);
        c.o = read(back ? "o" : "out", o.o), c.lse = back ? read("lse", o.lse) : read.if_given("lse", o.lse);
        if (back) {
            c.dout = read("dout", o.dout), c.dq = read("dq", o.dq), c.dk = read("dk", o.dk), c.dv = read("dv", o.dv);
        }
        call const now(where, *this);
        attend_on(there(), c, back);
    }

    std::unique_ptr<experts_of_batch> share(nb::handle chosen_, index_t experts, nb::handle places_) override {
        char const* const where = "expert_exchange";
        tensor const chosen = reader(where, device_)("chosen", chosen_);
        auto const places = integers(where, "places", nb::borrow(places_));
        auto made = [&] {
            call const now(where, *this);
            return share_on(there(), chosen, experts, places);
        }();
        return std::make_unique<rank_experts>(*this, std::move(made));
    }
    std::unique_ptr<positions_of_rank> place(cpx::media const& m, any_layout const& sharding, nb::handle ids_,
                                             cpx::media_tokens const& tokens) override {
        char const* const where = "mrope_positions";
        tensor const ids = reader(where, device_)("ids", ids_);
        auto made = [&] {
            call const now(where, *this);
            return place_on(there(), m, sharding, ids, tokens);
        }();
        return std::make_unique<rank_positions>(*this, std::move(made));
    }

private:
    class rank_experts final : public experts_of_batch {
    public:
        rank_experts(nccl_rank& comm, std::unique_ptr<device_experts> made) : comm_(comm), made_(std::move(made)) {}
        expert_lists const& lists() const override { return made_->lists(); }
        void to_experts(nb::handle x, nb::handle out) override {
            run("ExpertExchange.to_experts", x, out, &device_experts::to_experts);
        }
        void to_tokens(nb::handle x, nb::handle out) override {
            run("ExpertExchange.to_tokens", x, out, &device_experts::to_tokens);
        }

    private:
        void run(char const* where, nb::handle x_, nb::handle out_,
                 void (device_experts::*move)(tensor const&, tensor const&)) {
            reader const read(where, comm_.device_);
            tensor const x = read("x", x_), out = read("out", out_);
            call const now(where, comm_);
            comm_.there();
            ((*made_).*move)(x, out);
        }

        nccl_rank& comm_;
        std::unique_ptr<device_experts> made_;
    };

    class rank_positions final : public positions_of_rank {
    public:
        rank_positions(nccl_rank& comm, std::unique_ptr<device_positions> made) : comm_(comm), made_(std::move(made)) {}
        placed_rows const& rows() const override { return made_->rows(); }
        std::vector<index_t> deltas(communicator& comm) const override {
            char const* const where = "mrope_positions";
            cpx::require(&comm == &comm_, where, "communicator", "the one that the positions were made with",
                         "another");
            call const now(where, comm_);
            comm_.there();
            return made_->deltas();
        }
        void run(feature_step step, char const* where, cpx::media_kind kind, nb::handle x_,
                 nb::handle features_) const override {
            bool const back = goes_back(step);
            reader const read(where, comm_.device_);
            tensor const x = read(back ? "dx" : "x", x_), features = read(back ? "dfeatures" : "features", features_);
            call const now(where, comm_);
            comm_.there();
            made_->run(step, kind, x, features);
        }

    private:
        nccl_rank& comm_;
        std::unique_ptr<device_positions> made_;
    };

    device_group& there() const {
        require_there(*group_);
        return *group_;
    }

    group_pointer group_;
    int device_;
    nb::object pool_ = nb::none();
};

group_options options_of(double deadline, std::optional<index_t> window, int blocks) {
    cpx::require(std::isfinite(deadline) && deadline > 0, "communicator", "deadline, s", "more than 0", deadline);
    index_t const bytes = window.value_or(group_options::grown);
    cpx::require(!window || (bytes >= 0 && bytes < index_t{1} << 36), "communicator", "window, bytes",
                 "from 0 to less than 64 GiB", bytes);
    cpx::require(blocks >= 0, "communicator", "blocks", "not negative", blocks);
    return {std::chrono::milliseconds(static_cast<long long>(std::ceil(std::min(deadline, 1e8) * 1000))), bytes,
            blocks};
}

framework& framework_or_throw(nb::handle type) {
    auto* const found = framework_of(type);
    cpx::require(found != nullptr, "communicator", "tensors", "of torch 2.10 or newer, with DLPack's exchange of C",
                 nb::cast<std::string>(nb::str(type)));
    return *found;
}

std::shared_ptr<communicator> adopt(nb::handle tensors, std::uintptr_t comm, int device, double deadline,
                                    std::optional<index_t> window, int blocks) {
    auto& from = framework_or_throw(tensors);
    auto const of = options_of(deadline, window, blocks);
    auto group = [&] {
        nb::gil_scoped_release const free;
        return adopt_group(reinterpret_cast<void*>(comm), device, of, from);
    }();
    return std::make_shared<nccl_rank>(std::move(group), device);
}

std::shared_ptr<communicator> make(nb::handle tensors, nb::bytes const& id, int rank, int ranks, int device,
                                   double deadline, std::optional<index_t> window, int blocks) {
    auto& from = framework_or_throw(tensors);
    auto const of = options_of(deadline, window, blocks);
    std::string const common(id.c_str(), id.size());
    auto group = [&] {
        nb::gil_scoped_release const free;
        return make_group(common, rank, ranks, device, of, from);
    }();
    return std::make_shared<nccl_rank>(std::move(group), device);
}

/// Returns the framework of a tensor, and the number of the device on which it is.
std::pair<framework*, int> place_of(char const* where, char const* name, nb::handle x) {
    auto* const from = framework_of(x.type());
    dlpack::tensor found{};
    bool const there = from && from->by().describe(x.ptr(), &found) == 0;
    PyErr_Clear();
    cpx::require(there, where, name, "a tensor of torch 2.10 or newer", "another object");
    return {from, found.where.id};
}

void rotary(nb::handle x, nb::handle positions, index_t head_dim, nb::handle frequencies, std::vector<int> axes,
            std::string_view rounding, bool back, nb::handle y) {
    char const* const where = back ? "rotary_backward" : "rotary";
    auto const [from, device] = place_of(where, "x", x);
    reader const read(where, device);
    rotary_call c;
    c.x = read(back ? "dy" : "x", x), c.positions = read("positions", positions), c.y = read(back ? "dx" : "out", y);
    c.axes = std::move(axes), c.head_dim = head_dim, c.back = back;
    c.how = word<cpx::rounding>(
        where, "rounding", rounding,
        {{"fp32_inside", cpx::rounding::fp32_inside}, {"round_each_op", cpx::rounding::round_each_op}});
    with_float(binding::read(where, "frequencies", frequencies), [&]<class T>(of_type<T>) {
        for (T const f : list_of<T>(binding::read(where, "frequencies", frequencies)))
            c.frequencies.push_back(static_cast<double>(f));
    });
    nb::gil_scoped_release const free;
    rotate_on(*from, device, c);
}

void gated_rms_norm(nb::handle x, nb::handle z, nb::handle weight, double eps, nb::handle y) {
    char const* const where = "gated_rms_norm";
    auto const [from, device] = place_of(where, "x", x);
    reader const read(where, device);
    norm_call c;
    c.x = read("x", x), c.z = read("z", z), c.weight = read("weight", weight), c.y = read("out", y), c.eps = eps;
    nb::gil_scoped_release const free;
    normalise_on(*from, device, c, false);
}

void gated_rms_norm_backward(nb::handle x, nb::handle z, nb::handle weight, nb::handle dy, double eps, nb::handle dx,
                             nb::handle dz, nb::handle terms) {
    char const* const where = "gated_rms_norm_backward";
    auto const [from, device] = place_of(where, "x", x);
    reader const read(where, device);
    norm_call c;
    c.x = read("x", x), c.z = read("z", z), c.weight = read("weight", weight), c.eps = eps;
    c.dy = read("dy", dy), c.dx = read("dx", dx), c.dz = read("dz", dz), c.terms = read("terms", terms);
    nb::gil_scoped_release const free;
    normalise_on(*from, device, c, true);
}

void delta_gates(nb::handle b, nb::handle a, nb::handle A_log, nb::handle dt_bias, nb::handle g, nb::handle beta) {
    char const* const where = "delta_gates";
    auto const [from, device] = place_of(where, "a", a);
    reader const read(where, device);
    gates_call c;
    c.b = read("b", b), c.a = read("a", a), c.A_log = read("A_log", A_log), c.dt_bias = read("dt_bias", dt_bias);
    c.g = read("g", g), c.beta = read("beta", beta);
    nb::gil_scoped_release const free;
    open_gates_on(*from, device, c, false);
}

void delta_gates_backward(nb::handle b, nb::handle a, nb::handle A_log, nb::handle dt_bias, nb::handle dg,
                          nb::handle dbeta, nb::handle db, nb::handle da, nb::handle terms) {
    char const* const where = "delta_gates_backward";
    auto const [from, device] = place_of(where, "a", a);
    reader const read(where, device);
    gates_call c;
    c.b = read("b", b), c.a = read("a", a), c.A_log = read("A_log", A_log), c.dt_bias = read("dt_bias", dt_bias);
    c.dg = read("dg", dg), c.dbeta = read("dbeta", dbeta), c.db = read("db", db), c.da = read("da", da);
    c.terms = read("terms", terms);
    nb::gil_scoped_release const free;
    open_gates_on(*from, device, c, true);
}

} // namespace

} // namespace binding

NB_MODULE(_cuda, m) {
    using namespace binding;
    m.doc() = "Ranks of cpx whose arrays are on devices, for its Python package.";
    nb::set_leak_warnings(false);
    nb::module_::import_("cpx._ext"); // of whose communicators this has one
    nb::class_<nccl_rank, communicator>(m, "NcclRank", nb::is_weak_referenceable(), "One rank of an NCCL communicator.")
        .def_prop_ro("kept_chunk", &nccl_rank::kept_chunk,
                     "Bytes that the gated delta rule of 16 bits keeps of 64 tokens and a value head on tensor cores.")
        .def_prop_ro("exchange_path", &nccl_rank::exchange_path,
                     R"(How exchanges that do not add move rows between ranks, the same on all of them: "window", one
kernel into memory that ranks write to each other, or "messages" of NCCL's; "undecided" before the first one.)")
        .def_prop_ro("room", &nccl_rank::room,
                     "Bytes of the window that an allocator may take at once for results; 0: there is no window.")
        .def("holds", &nccl_rank::holds, "address"_a, "Returns whether that is in the window.")
        .def_prop_rw("pool", &nccl_rank::pool, &nccl_rank::set_pool, nb::arg().none(),
                     "What holds memory of the window, until `leave`.")
        .def("lend", &nccl_rank::lend, "on"_a,
             "Says whether cpx_window_allocate, in this thread, takes memory of the window.")
        .def("wait", &nccl_rank::wait,
             R"(Waits until the device has done all that it was given in the current stream.

Raises cpx.Error that names the ranks that did not come within the deadline, or that moved rows of another batch.)");
    m.def("nccl_adopt", adopt, "tensors"_a, "comm"_a, "device"_a, "deadline"_a, nb::arg("window").none(), "blocks"_a,
          "Returns the rank of a communicator that is there, by its address, for tensors of that type. Collective.");
    m.def(
        "nccl_id",
        [] {
            std::string const id = new_group_id();
            return nb::bytes(id.data(), id.size());
        },
        "Returns the id of a new communicator, for one rank to give to the others.");
    m.def("nccl_make", make, "tensors"_a, "id"_a, "rank"_a, "ranks"_a, "device"_a, "deadline"_a,
          nb::arg("window").none(), "blocks"_a, "Returns the rank of a new communicator. Collective.");
    m.def("rotary", rotary, "x"_a, "positions"_a, "head_dim"_a, "frequencies"_a, "axes"_a, "rounding"_a, "back"_a,
          "out"_a);
    m.def("gated_rms_norm", gated_rms_norm, "x"_a, "z"_a, "weight"_a, "eps"_a, "out"_a);
    m.def("gated_rms_norm_backward", gated_rms_norm_backward, "x"_a, "z"_a, "weight"_a, "dy"_a, "eps"_a, "dx"_a, "dz"_a,
          "terms"_a);
    m.def("delta_gates", delta_gates, "b"_a, "a"_a, "A_log"_a, "dt_bias"_a, "g"_a, "beta"_a);
    m.def("delta_gates_backward", delta_gates_backward, "b"_a, "a"_a, "A_log"_a, "dt_bias"_a, "dg"_a, "dbeta"_a, "db"_a,
          "da"_a, "terms"_a);
}
