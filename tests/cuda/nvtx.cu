// SPDX-License-Identifier: Apache-2.0
// What a profiler is told: this test is the tool that NVTX calls.
#include <cpx/cuda/row_gather.hpp>

#include <doctest/doctest.h>

#include <support/skipped.hpp>

#include "gpus.hpp"

#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace {

struct records {
    std::vector<std::string> domains, names; ///< a handle is a place in these, from 1 on
    std::vector<std::string> events;
};
records& tool() {
    static records all;
    return all;
}
std::mutex at_once; // the program's other tests have ranks in threads

template <class Handle>
Handle keep(std::vector<std::string>& in, char const* text) {
    in.push_back(text);
    return reinterpret_cast<Handle>(in.size());
}
std::string text_of(std::vector<std::string> const& in, void const* handle) {
    auto const place = reinterpret_cast<std::size_t>(handle);
    return place > 0 && place <= in.size() ? in[place - 1] : "no handle";
}

nvtxDomainHandle_t create_domain(char const* name) {
    std::lock_guard const lock(at_once);
    return keep<nvtxDomainHandle_t>(tool().domains, name);
}
nvtxStringHandle_t register_name(nvtxDomainHandle_t domain, char const* name) {
    std::lock_guard const lock(at_once);
    return keep<nvtxStringHandle_t>(tool().names, (text_of(tool().domains, domain) + ": " + name).c_str());
}
int push(nvtxDomainHandle_t, nvtxEventAttributes_t const* event) {
    std::lock_guard const lock(at_once);
    bool const by_handle = event->messageType == NVTX_MESSAGE_TYPE_REGISTERED;
    tool().events.push_back(by_handle ? text_of(tool().names, event->message.registered) : "text");
    return 0;
}
int pop(nvtxDomainHandle_t domain) {
    std::lock_guard const lock(at_once);
    tool().events.push_back(text_of(tool().domains, domain) + ": end");
    return 0;
}

int start(NvtxGetExportTableFunc_t table_of) {
    auto const* const callbacks = static_cast<NvtxExportTableCallbacks const*>(table_of(NVTX_ETID_CALLBACKS));
    NvtxFunctionTable table = nullptr;
    unsigned size = 0;
    if (!callbacks || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size)) return 0;
    *table[NVTX_CBID_CORE2_DomainCreateA] = reinterpret_cast<NvtxFunctionPointer>(create_domain);
    *table[NVTX_CBID_CORE2_DomainRegisterStringA] = reinterpret_cast<NvtxFunctionPointer>(register_name);
    *table[NVTX_CBID_CORE2_DomainRangePushEx] = reinterpret_cast<NvtxFunctionPointer>(push);
    *table[NVTX_CBID_CORE2_DomainRangePop] = reinterpret_cast<NvtxFunctionPointer>(pop);
    return 1;
}

void work(int times) {
    for (int i = 0; i < times; ++i) auto const range = cpx::cuda::named_range<"cpx work">();
}

/// Whom NVTX calls when it is used first.
bool const injected = (InitializeInjectionNvtx2_fnptr = start) != nullptr;

} // namespace

TEST_SUITE("cuda") {
    TEST_CASE("a profiler sees ranges within ranges, of names that are registered once") {
        REQUIRE(injected);
        {
            auto const range = cpx::cuda::named_range<"cpx step">();
            work(2);
        }
        CHECK(tool().domains == std::vector<std::string>{"cpx"});
        CHECK(tool().names == std::vector<std::string>{"cpx: cpx step", "cpx: cpx work"});
        CHECK(tool().events == std::vector<std::string>{"cpx: cpx step", "cpx: cpx work", "cpx: end", "cpx: cpx work",
                                                        "cpx: end", "cpx: end"});
    }
    TEST_CASE("an operator is a range") {
        if (!has_gpus()) return;
        cpx::cuda::buffer<float> const from(std::vector<float>(6, 1.0f)), to(6);
        std::vector<cpx::index_t> const order{2, 0, 1};
        cpx::cuda::buffer<cpx::index_t> const list(order);
        cpx::cuda::stream const stream;
        tool().events.clear();
        cpx::cuda::gather_rows(cpx::rows<float const>(from.data(), 3, 2),
                               std::span<cpx::index_t const>(list.data(), order.size()),
                               cpx::rows<float>(to.data(), 3, 2), stream);
        stream.synchronize();
        CHECK(tool().events == std::vector<std::string>{"cpx: cpx gather_rows", "cpx: end"});
    }
}
