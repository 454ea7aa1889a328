/** Break something of a job on purpose, where its fleet allows that, and what became of it each time. */
import { Button, NativeSelect } from '@mantine/core'
import { useDocumentTitle } from '@mantine/hooks'
import { useQuery, useQueryClient } from '@tanstack/react-query'
import { useState } from 'react'
import { Link } from 'react-router'

import { call } from '../api/client'
import { useJobAddresses } from '../api/addresses'
import { drillsQuery, fleetsQuery, jobQuery, jobsQuery, useRole } from '../api/queries'
import type { Drill, StartDrillRequest } from '../contract'
import { sentence } from '../model/format'
import { drillable, STRIKES, told } from '../model/drills'
import { Ago, Empty, JobLink, NodeLink, Shown, Status } from '../parts/Basics'
import { ConfirmByName } from '../parts/ConfirmByName'

const MOST = 200

export default function DrillsPage() {
  useDocumentTitle('Drills, Everstep')
  const query = useQuery(drillsQuery)
  const fleets = useQuery(fleetsQuery)
  const { isAdmin } = useRole()
  return (
    <div className="stack">
      <h1>Drills</h1>
      <Shown query={fleets} rows={2}>
        {(all) => {
          const allowed = all.filter((fleet) => fleet.AllowDrills).map((fleet) => fleet.FleetName)
          if (!isAdmin) return <p className="dim">An administrator starts drills; what became of them is here.</p>
          return allowed.length ? (
            <Start allowed={allowed} />
          ) : (
            <Empty title="No fleet allows drills" command={`everstep fleets update ${all[0]?.FleetName ?? 'main'} --allow-drills`}>
              A drill breaks something of a job that trains, as it breaks by itself on a bad day. Each fleet has to allow it.
            </Empty>
          )
        }}
      </Shown>
      <section className="card">
        <h2>History</h2>
        <Shown query={query}>{(drills) => (drills.length ? <History drills={drills} /> : <p className="dim">No drill yet.</p>)}</Shown>
      </section>
    </div>
  )
}

function Start({ allowed }: { allowed: string[] }) {
  const client = useQueryClient()
  const jobs = drillable(useQuery(jobsQuery).data ?? [], allowed)
  const [run, setRun] = useState('')
  const [type, setType] = useState<StartDrillRequest['DrillType']>('terminate-instance')
  const [node, setNode] = useState('')
  const [isAsking, setAsking] = useState(false)
  const addressOf = useJobAddresses()
  const summary = jobs.find((job) => job.RunId === run) ?? jobs[0]
  const chosen = summary && addressOf(summary)
  const job = useQuery({ ...jobQuery(chosen ?? ''), enabled: chosen !== undefined }).data
  const nodes = job?.NodeIds ?? []
  const target = nodes.includes(node) ? node : ''
  if (summary === undefined) return <Empty title="No job trains on a fleet that allows drills" command="everstep jobs list">A drill strikes a job that trains. {allowed.join(', ')} {allowed.length === 1 ? 'allows' : 'allow'} it.</Empty>
  return (
    <section className="card stack">
      <div className="row" style={{ alignItems: 'end' }}>
        <NativeSelect label="Job" value={summary.RunId} data={jobs.map((each) => ({ value: each.RunId, label: each.TrainingJobName }))} onChange={(event) => setRun(event.currentTarget.value)} />
        <NativeSelect label="What breaks" value={type} data={Object.entries(STRIKES).map(([value, { label }]) => ({ value, label }))} onChange={(event) => setType(event.currentTarget.value as typeof type)} />
        <NativeSelect label="On" value={target} data={[{ value: '', label: 'its last node' }, ...nodes]} onChange={(event) => setNode(event.currentTarget.value)} />
        <Button color="red" variant="outline" onClick={() => setAsking(true)}>
          Start the drill
        </Button>
      </div>
      <p className="dim">{STRIKES[type].does}</p>
      <ConfirmByName
        name={summary.TrainingJobName}
        verb="Strike"
        opened={isAsking}
        onClose={() => setAsking(false)}
        onConfirm={async () => {
          await call('StartDrill', { TrainingJobName: summary.RunId, DrillType: type, ...(target ? { NodeId: target } : {}) })
          void client.invalidateQueries()
        }}
      >
        <p>
          {STRIKES[type].label}, on {target || 'its last node'}. {STRIKES[type].does}
        </p>
        <p>The job is interrupted as by a real failure.</p>
      </ConfirmByName>
    </section>
  )
}

function History({ drills }: { drills: Drill[] }) {
  return (
    <div className="scroll">
      <table className="grid stacked">
        <thead>
          <tr>
            <th>Asked for</th>
            <th>Status</th>
            <th>Job</th>
            <th>What broke</th>
            <th>On</th>
            <th>By</th>
            <th>What became of it</th>
          </tr>
        </thead>
        <tbody>
          {drills
            .toReversed()
            .slice(0, MOST)
            .map((drill) => (
              <tr key={drill.DrillId}>
                <td data-name="Asked for"><Ago at={drill.CreationTime} /></td>
                <td data-name="Status"><Status {...told(drill.DrillStatus)} /></td>
                <td data-name="Job"><JobLink name={drill.TrainingJobName} /></td>
                <td data-name="What broke">{STRIKES[drill.DrillType]?.label ?? drill.DrillType}{drill.Rank === undefined ? '' : `, rank ${drill.Rank}`}</td>
                <td data-name="On"><NodeLink id={drill.NodeId} fleet={drill.FleetName} /></td>
                <td data-name="By">{drill.RequestedBy}</td>
                <td className="reason">
                  {sentence(drill.Outcome ?? '')} {drill.IncidentId && <Link to={`/incidents/${encodeURIComponent(drill.IncidentId)}`}>Its incident</Link>}
                </td>
              </tr>
            ))}
        </tbody>
      </table>
    </div>
  )
}
