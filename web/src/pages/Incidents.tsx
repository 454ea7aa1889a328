/** Incidents of all jobs, newest first; the filter is in the URL. */
import { SegmentedControl } from '@mantine/core'
import { useDocumentTitle } from '@mantine/hooks'
import { useQuery } from '@tanstack/react-query'

import { incidentsQuery } from '../api/queries'
import { count, plural } from '../model/format'
import { causeWords } from '../model/verdict'
import { Empty, Filter, Shown } from '../parts/Basics'
import { IncidentTable } from '../parts/IncidentTable'
import { useAddress } from '../parts/address'

const MOST = 500

export default function IncidentsPage() {
  useDocumentTitle('Incidents, Everstep')
  const query = useQuery(incidentsQuery())
  const [search, set] = useAddress()
  const text = search.get('q') ?? ''
  const which = search.get('show') ?? 'all'
  return (
    <div className="stack">
      <h1>Incidents</h1>
      <Shown query={query}>
        {(incidents) => {
          const found = incidents
            .filter((each) => which !== 'open' || each.ClosedAt === undefined)
            .filter((each) => `${each.TrainingJobName} ${each.Cause} ${causeWords(each.Cause)} ${(each.FaultedInstanceIds ?? []).join(' ')} ${each.IncidentId}`.toLowerCase().includes(text.toLowerCase()))
            .toSorted((a, b) => b.OpenedAt - a.OpenedAt)
          return incidents.length ? (
            <>
              <div className="row">
                <Filter label="Filter incidents" placeholder="Job, cause or instance  ( / )" value={text} onChange={(value) => set({ q: value })} />
                <SegmentedControl size="xs" aria-label="Which" value={which} onChange={(value) => set({ show: value === 'all' ? '' : value })} data={[{ value: 'all', label: 'All' }, { value: 'open', label: 'Open' }]} />
                <span className="dim">{incidents.length >= 1_000 && 'The newest 1,000: '}{found.length === incidents.length ? plural(found.length, 'incident') : `${count(found.length)} of ${plural(incidents.length, 'incident')}`}</span>
              </div>
              <section className="card" style={{ padding: '4px 8px' }}>
                {found.length ? <IncidentTable incidents={found.slice(0, MOST)} /> : <p className="dim" style={{ padding: 12 }}>No incident is like that.</p>}
              </section>
            </>
          ) : (
            <Empty title="No incident yet" command="everstep incidents list">
              A failure that ends a launch of a job is one incident, with its recovery.
            </Empty>
          )
        }}
      </Shown>
    </div>
  )
}
