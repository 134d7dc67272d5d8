// The house rules hold in every file of the project, and each rule finds what it is there for.
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tests/tidy/project.h"
#include "tests/tidy/rules.h"

namespace lockstep::tidy {
namespace {

using Rule = Findings (*)(const SourceFile&);

void expect_everywhere(Rule rule) {
  std::string broken;
  for (const SourceFile& file : project()) broken += text_of(rule(file));
  EXPECT_TRUE(broken.empty()) << broken;
}

TEST(Project, LinesAreShortAndClean) { expect_everywhere(check_lines); }
TEST(Project, FilesHoldOneIdea) { expect_everywhere(check_shape); }
TEST(Project, NothingIsUnfinishedOrOfOneMachine) { expect_everywhere(check_words); }
TEST(Project, NothingDiffersFromRunToRun) { expect_everywhere(check_determinism); }
TEST(Project, LibrariesNeitherPrintNorExit) { expect_everywhere(check_library_manners); }
TEST(Project, IncludesNameTheirFolder) { expect_everywhere(check_includes); }
TEST(Project, TermsAreTheFieldsOwn) { expect_everywhere(check_terms); }

TEST(Project, ReleasesAreNamedByTheirProfiles) { expect_everywhere(check_release_names); }
TEST(Project, DefectsArePlantedInSeams) { expect_everywhere(check_seams); }
TEST(Project, FoldersHoldFortyFiles) { EXPECT_EQ(text_of(check_folder_sizes(project())), ""); }
TEST(Project, TypesAreDefinedOnce) { EXPECT_EQ(text_of(check_definitions(project())), ""); }

TEST(Project, TheTopLevelHoldsOnlyWhatItShould) {
  std::string strangers;
  for (const auto& entry : std::filesystem::directory_iterator(root())) {
    const std::string name = entry.path().filename().string();
    if (name[0] == '.' || name == "build") continue;
    if (!(entry.is_directory() ? top_folders() : top_files()).contains(name))
      strangers += name + "\n";
  }
  EXPECT_EQ(strangers, "");
}

TEST(Project, EveryPackageIsNamedOnce) {
  std::istringstream lines(text_of(root() / "cmake/debian-packages.txt"));
  std::set<std::string> seen;
  for (std::string line; std::getline(lines, line);) {
    const std::string name = line.substr(0, line.find_first_of(" #"));
    if (name.empty()) continue;
    EXPECT_TRUE(seen.insert(name).second) << name << " is listed twice";
  }
  EXPECT_GE(seen.size(), 10u);
}

TEST(FolderSizes, OfMoreThanFortyFilesAreFound) {
  std::vector<SourceFile> files;
  for (int i = 0; i < 40; ++i) files.push_back({fmt::format("sim/{}.h", i), ""});
  files.push_back({"sim/engine/a.h", ""});
  EXPECT_EQ(text_of(check_folder_sizes(files)), "");
  files.push_back({"sim/a.h", ""});
  EXPECT_EQ(text_of(check_folder_sizes(files)), "sim/:0: 41 files\n");
}

// Neither a second declaration nor a type of another namespace is a second type.
TEST(Definitions, OfOneNameInTwoHeadersAreFound) {
  const auto in = [](const char* scope, const char* line) {
    return fmt::format("namespace {} {{\nclass A;\n{}\n", scope, line);
  };
  const SourceFile first = {"sim/a.h", in("lockstep", "class A {")};
  EXPECT_EQ(text_of(check_definitions({first, {"sim/b.h", in("lockstep", "struct A {")}})),
            "sim/b.h:3: A is a type of sim/a.h already\n");
  EXPECT_EQ(text_of(check_definitions({first, {"sim/b.h", in("lockstep", "class A;")}})), "");
  EXPECT_EQ(text_of(check_definitions({first, {"sim/b.h", in("lockstep", "class B {")}})), "");
  EXPECT_EQ(text_of(check_definitions({first, {"sim/b.h", in("simt", "class A {")}})), "");
  EXPECT_EQ(text_of(check_definitions({first, {"sim/b.cpp", in("lockstep", "class A {")}})), "");
}

struct Planted {
  const char* name;
  Rule rule;
  const char* path;
  std::string bad;
  std::string good;
};

class RuleFinds : public testing::TestWithParam<Planted> {};

TEST_P(RuleFinds, ThePlantedLineAndNothingInTheGoodOne) {
  const Planted& planted = GetParam();
  EXPECT_EQ(planted.rule({planted.path, planted.bad}).size(), 1u) << planted.bad;
  EXPECT_EQ(planted.rule({planted.path, planted.good}).size(), 0u) << planted.good;
}

INSTANTIATE_TEST_SUITE_P(
    Each, RuleFinds,
    testing::Values(
        Planted{"LongLine", check_lines, "sim/a.cpp", std::string(101, 'x') + "\n",
                std::string(100, 'x') + "\n"},
        Planted{"Utf8IsCountedInCharacters", check_lines, "sim/a.cpp",
                std::string(100, 'x') + "é\n", std::string(99, 'x') + "é\n"},
        Planted{"Tab", check_lines, "run", "a\tb\n", "a b\n"},
        Planted{"SpaceAtTheEnd", check_lines, "run", "a \n", "a\n"},
        Planted{"NoLastNewline", check_lines, "run", "a", "a\n"},
        Planted{"LongFile", check_shape, "sim/a.cpp", std::string(601, '\n'),
                std::string(600, '\n')},
        Planted{"Guard", check_shape, "sim/a.h", "// A.\n", "// A.\n#pragma once\n"},
        Planted{"Opening", check_shape, "sim/a.h", "#pragma once\n", "// A.\n#pragma once\n"},
        Planted{"MachinePath", check_words, "README.md",
                "see /tm"
                "p/x\n",
                "see tmp/x\n"},
        Planted{"Unfinished", check_words, "sim/a.cpp",
                "// TO"
                "DO: more\n",
                "// done\n"},
        Planted{"Distribution", check_determinism, "sim/a.cpp",
                "std::uniform_int_distribution<int> d;\n", "// std::uniform_int_distribution\n"},
        Planted{"Rand", check_determinism, "sim/a.cpp", "int x = rand();\n", "int x = grand();\n"},
        Planted{"Print", check_library_manners, "sim/a.cpp", "std::cout << 1;\n", "format(1);\n"},
        Planted{"ClockInTheModel", check_library_manners, "reference/a.cpp", "#include <chrono>\n",
                "#include <cstdint>\n"},
        Planted{"IncludeWithoutFolder", check_includes, "tests/a.cpp", "#include \"a.h\"\n",
                "#include \"tests/a.h\"\n"},
        Planted{"LongLineOfADocument", check_lines, "docs/a.md", std::string(101, 'x') + "\n",
                "```\n" + std::string(101, 'x') + "\n```\n"},
        Planted{"Release", check_release_names, "sim/a.cpp",
                "if (name == \"vllm-0.1.0\") return;\n",
                "source = \"vllm-ascend 1\";  // \"vllm-0.1.0\"\n"},
        Planted{"DefectInTheBackend", check_seams, "cuda_backend/step/a.cpp",
                "#include \"cuda_backend/defect.h\"\n", "#include \"cuda_backend/device.h\"\n"},
        Planted{"DefectInAKernel", check_seams, "cuda_backend/kernels/a.cuh",
                "template <int kItem, WriteDefect kDefect>\n", "template <int kItem>\n"},
        Planted{"DefectInALauncher", check_seams, "cuda_backend/launch/a.cpp",
                "if (place.is_defect) return 0;\n", "return 0;\n"},
        Planted{"DefectInTheScheduler", check_seams, "reference/schedule/a.cpp",
                "#include \"reference/defects/scheduler_defect.h\"\n",
                "#include \"reference/schedule/scheduler.h\"\n"},
        Planted{"BarePageSize", check_terms, "sim/a.cpp", "int page_size = 1;\n",
                "int page_size_bytes = 1;\n"},
        Planted{"Restrict", check_terms, "cuda_backend/kernels/a.cuh",
                "__global__ void f(const int* __restrict__ p);\n",
                "__global__ void f(const int* p);\n"},
        Planted{"MemcpyInAKernel", check_terms, "cuda_backend/kernels/a.cuh",
                "memcpy(&to, from, 4);\n", "to = simt::load_any(from);\n"},
        Planted{"StrayKernel", check_terms, "sim/a.cpp", "__global__ void f();\n", "void f();\n"}),
    [](const auto& planted) { return std::string(planted.param.name); });

}  // namespace
}  // namespace lockstep::tidy
