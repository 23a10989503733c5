package fleet

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"text/tabwriter"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
)

// Table writes the objects at a path of the API server
// ("/apis/net.liqo.io/v1alpha1/networkconfigs") as `kubectl get` does: the API server formats the
// rows from the kind's printer columns. wide adds the columns that `kubectl get -o wide` adds.
func (c *Cluster) Table(ctx context.Context, w io.Writer, path string, wide bool) error {
	table, err := c.table(ctx, path)
	if err != nil {
		return fmt.Errorf("cluster %s: %s: %w", c.Name, path, err)
	}
	out := tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)
	row := func(cells []string) { fmt.Fprintln(out, strings.Join(cells, "\t")) }
	shown := func(i int) bool { return wide || table.ColumnDefinitions[i].Priority == 0 }
	var header []string
	for i, column := range table.ColumnDefinitions {
		if shown(i) {
			header = append(header, strings.ToUpper(column.Name))
		}
	}
	row(header)
	for _, r := range table.Rows {
		var cells []string
		for i, cell := range r.Cells {
			if shown(i) {
				cells = append(cells, fmt.Sprint(orEmpty(cell)))
			}
		}
		row(cells)
	}
	return out.Flush()
}

func orEmpty(cell any) any {
	if cell == nil {
		return ""
	}
	return cell
}

func (c *Cluster) table(ctx context.Context, path string) (*metav1.Table, error) {
	client, err := rest.HTTPClientFor(c.Config)
	if err != nil {
		return nil, err
	}
	defer client.CloseIdleConnections()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, c.Config.Host+path, nil)
	if err != nil {
		return nil, err
	}
	request.Header.Set("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io")
	response, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("the API server returned the status %s", response.Status)
	}
	table := &metav1.Table{}
	return table, json.NewDecoder(response.Body).Decode(table)
}
