package verify

import (
	"encoding/xml"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/isthmus-net/isthmus/internal/safetext"
)

// A Result is the result of a check.
type Result struct {
	Check
	Answer
	// Unknown is the reason why there is no result: the sender got no request, or the receiver
	// does not answer in its own cluster either.
	Unknown string `json:"unknown,omitempty"`
}

// A Report has the results of a run.
type Report struct {
	Local   string    `json:"local"` // names of the clusters
	Remote  string    `json:"remote"`
	At      time.Time `json:"at"`
	Checks  int       `json:"checks"`
	Failed  int       `json:"failed"`
	Unknown int       `json:"unknown"` // number of results with Unknown; they are not counted in Failed
	Results []Result  `json:"results"`
	// LeftOut lists the checks that were not performed, with the reasons.
	LeftOut []string `json:"leftOut,omitempty"`
}

func (r *Report) add(results ...Result) {
	for _, one := range results {
		r.Checks++
		switch {
		case one.Unknown != "":
			r.Unknown++
		case one.Error != "":
			r.Failed++
		}
	}
	r.Results = append(r.Results, results...)
}

// Print writes a table for people.
func (r *Report) Print(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "FROM\tTO\tPROTOCOL\tOCTETS\tRESULT\tTIME\tSEEN AS")
	for _, one := range r.Results {
		result, took, seen := "ok", fmt.Sprintf("%.1fms", one.Seconds*1000), "-"
		switch {
		case one.Unknown != "":
			result, took = "unknown: "+safetext.Of(one.Unknown), "-"
		case one.Error != "":
			result, took = safetext.Of(one.Error), "-"
		case one.Tries > 1:
			result = fmt.Sprintf("ok, attempt %d", one.Tries)
		}
		if one.SeenAs.IsValid() {
			seen = one.SeenAs.String()
		}
		fmt.Fprintf(t, "%v\t%s\t%s\t%d\t%s\t%s\t%s\n", one.From, safetext.Of(one.receiver()), one.Protocol, one.Size, result, took, seen)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "\n%d checks, %d failed, %d unknown\n", r.Checks, r.Failed, r.Unknown)
	for _, what := range r.LeftOut {
		fmt.Fprintf(w, "left out: %s\n", safetext.Of(what))
	}
	return err
}

// JUnit writes the report in the format of CI systems.
func (r *Report) JUnit(w io.Writer) error {
	type failure struct {
		Message string `xml:"message,attr"`
	}
	type testcase struct {
		Class   string   `xml:"classname,attr"`
		Name    string   `xml:"name,attr"`
		Time    string   `xml:"time,attr"`
		Failure *failure `xml:"failure"`
		Error   *failure `xml:"error"` // the result is unknown
		Skipped *failure `xml:"skipped"`
	}
	type suite struct {
		XMLName   xml.Name   `xml:"testsuite"`
		Name      string     `xml:"name,attr"`
		Tests     int        `xml:"tests,attr"`
		Failures  int        `xml:"failures,attr"`
		Errors    int        `xml:"errors,attr"`
		Skipped   int        `xml:"skipped,attr"`
		Timestamp string     `xml:"timestamp,attr"`
		Cases     []testcase `xml:"testcase"`
	}
	out := suite{
		Name: "isthmus verify " + r.Local + " " + r.Remote, Tests: r.Checks + len(r.LeftOut), Failures: r.Failed, Errors: r.Unknown,
		Skipped: len(r.LeftOut), Timestamp: r.At.UTC().Format("2006-01-02T15:04:05"),
	}
	for _, one := range r.Results {
		c := testcase{Class: one.From.String() + " to " + one.receiver(), Name: fmt.Sprintf("%s %d octets", one.Protocol, one.Size), Time: fmt.Sprintf("%.4f", one.Seconds)}
		switch {
		case one.Unknown != "":
			c.Error = &failure{one.Unknown}
		case one.Error != "":
			c.Failure = &failure{one.Error}
		}
		out.Cases = append(out.Cases, c)
	}
	for _, what := range r.LeftOut {
		out.Cases = append(out.Cases, testcase{Class: "left out", Name: what, Time: "0", Skipped: &failure{what}})
	}
	if _, err := io.WriteString(w, xml.Header); err != nil {
		return err
	}
	e := xml.NewEncoder(w)
	e.Indent("", "  ")
	if err := e.Encode(out); err != nil {
		return err
	}
	_, err := io.WriteString(w, "\n")
	return err
}
