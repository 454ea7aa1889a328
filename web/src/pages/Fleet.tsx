/** One fleet: its group, what differs from the contract, and its nodes. */
import { Button, NumberInput, Switch } from '@mantine/core'
import { useDocumentTitle } from '@mantine/hooks'
import { useQuery, useQueryClient } from '@tanstack/react-query'
import { useState } from 'react'
import { Link, useLocation, useParams, useSearchParams } from 'react-router'

import { call } from '../api/client'
import { fleetsQuery, nodesQuery, useRole } from '../api/queries'
import type { Fleet } from '../contract'
import { bytes, count, sentence } from '../model/format'
import { Ago, Empty, FactList, JobLink, Problem, Shown, Status, toneOf } from '../parts/Basics'
import { EventList } from './JobTabs'

export default function FleetPage() {
  const { name = '' } = useParams()
  useDocumentTitle(`Fleet ${name}, Everstep`)
  const query = useQuery(fleetsQuery)
  return (
    <Shown query={query}>
      {(fleets) => {
        const fleet = fleets.find((each) => each.FleetName === name)
        return fleet ? <Told fleet={fleet} /> : <Empty title={`There is no fleet named ${name}`} command="everstep fleets list" />
      }}
    </Shown>
  )
}

function Told({ fleet }: { fleet: Fleet }) {
  const { isAdmin } = useRole()
  const drift = fleet.Drift ?? []
  return (
    <div className="stack">
      <div>
        <div className="dim">
          <Link to="/fleets">Fleets</Link>
        </div>
        <div className="row">
          <h1>{fleet.FleetName}</h1>
          <Status tone={toneOf(fleet.FleetStatus)} word={fleet.FleetStatus} />
        </div>
        <p className="dim">{sentence(fleet.Reason ?? '')}</p>
      </div>
      {drift.length > 0 && (
        <section className="card problem tone-warn" role="status">
          <h2>The group is not as Everstep needs it</h2>
          <p>Nothing is ended until this is put right:</p>
          <ul>
            {drift.map((each) => (
              <li key={each}>{each}</li>
            ))}
          </ul>
        </section>
      )}
      <section className="card">
        <FactList
          facts={[
            ['Nodes', `${count(fleet.NodeCount)} of ${count(fleet.DesiredNodeCount)} desired, at most ${count(fleet.MaxNodeCount)}`],
            ['Connected', count(fleet.ConnectedNodeCount)],
            ['Spares wanted', count(fleet.SpareCount)],
            ['Kept when idle', count(fleet.MinNodeCount)],
            ['Group', <code key="group">{fleet.AutoScalingGroupName}</code>],
            ['Instances', `${fleet.InstanceType || 'not known'}, ${fleet.AvailabilityZone || 'zone not known'}`],
            ['Price', fleet.PriceUsdPerHour === undefined ? 'not known' : `$${fleet.PriceUsdPerHour.toFixed(2)}/h a node, $${(fleet.PriceUsdPerHour * fleet.NodeCount).toFixed(2)}/h now`],
            ['Created', <Ago key="created" at={fleet.CreationTime} />],
          ]}
        />
        {isAdmin && fleet.FleetStatus !== 'deleting' && <Change key={`${fleet.SpareCount}-${fleet.MinNodeCount}`} fleet={fleet} />}
      </section>
      <Nodes fleet={fleet} />
      <div>
        <h2>Events</h2>
        <EventList scope={{ fleet: fleet.FleetName }} most={40} />
      </div>
    </div>
  )
}

function Change({ fleet }: { fleet: Fleet }) {
  const client = useQueryClient()
  const [spares, setSpares] = useState<number | string>(fleet.SpareCount)
  const [least, setLeast] = useState<number | string>(fleet.MinNodeCount)
  const [error, setError] = useState<unknown>()
  const isSame = Number(spares) === fleet.SpareCount && Number(least) === fleet.MinNodeCount
  return (
    <form
      className="row"
      style={{ alignItems: 'end', marginTop: 14 }}
      onSubmit={(event) => {
        event.preventDefault()
        setError(undefined)
        call('UpdateFleet', { FleetName: fleet.FleetName, SpareCount: Number(spares), MinNodeCount: Number(least) }).then(() => client.invalidateQueries(), setError)
      }}
    >
      <NumberInput label="Spares" size="xs" w={110} min={0} allowDecimal={false} value={spares} onChange={setSpares} />
      <NumberInput label="Kept when idle" size="xs" w={110} min={0} allowDecimal={false} value={least} onChange={setLeast} />
      <Button type="submit" size="xs" disabled={isSame || spares === '' || least === ''}>
        Change
      </Button>
      {error !== undefined && <Problem error={error} title="It was not changed" />}
    </form>
  )
}

const MOST = 500

function Nodes({ fleet }: { fleet: Fleet }) {
  const [search, setSearch] = useSearchParams()
  const target = useLocation().hash.slice(1)
  const isEnded = search.get('ended') === '1' || target !== ''
  const query = useQuery(nodesQuery(fleet.FleetName, isEnded))
  return (
    <section className="card">
      <div className="row between">
        <h2>Nodes</h2>
        <Switch size="xs" label="Ended ones, too" checked={isEnded} disabled={target !== ''} onChange={(event) => setSearch(event.currentTarget.checked ? { ended: '1' } : {}, { replace: true })} />
      </div>
      <Shown query={query}>
        {(nodes) =>
          nodes.length ? (
            <div className="scroll">
              <table className="grid stacked">
                <thead>
                  <tr>
                    <th>Node</th>
                    <th>Status</th>
                    <th>Agent</th>
                    <th>Job</th>
                    <th>Reason</th>
                    <th>Address</th>
                    <th className="n">Memory</th>
                    <th>Since</th>
                  </tr>
                </thead>
                <tbody>
                  {nodes
                    .toSorted((a, b) => Number(b.NodeId === target) - Number(a.NodeId === target))
                    .slice(0, MOST)
                    .map((node) => (
                      <tr key={node.NodeId} id={node.NodeId} className={node.NodeId === target ? 'target' : undefined}>
                        <td className="mono" data-name="Node">{node.NodeId}</td>
                        <td data-name="Status"><Status tone={toneOf(node.NodeStatus)} word={node.NodeStatus} /></td>
                        <td data-name="Agent">
                          {node.NodeStatus === 'gone' ? '–' : <Status tone={node.Connected ? 'good' : 'warn'} word={node.Connected ? (node.Warm ? 'connected, warm' : 'connected') : 'not connected'} />}
                          {node.RefusedMessageCount + node.RefusedSessionCount > 0 && <div className="dim">{count(node.RefusedMessageCount)} messages, {count(node.RefusedSessionCount)} sessions refused</div>}
                        </td>
                        <td data-name="Job">{node.TrainingJobName ? <JobLink name={node.TrainingJobName} /> : '–'}</td>
                        <td className="reason">{node.Reason}</td>
                        <td className="mono" data-name="Address">{node.Address || '–'}</td>
                        <td className="n" data-name="Memory">{node.MemoryBytes ? bytes(node.MemoryBytes) : '–'}</td>
                        <td data-name="Since"><Ago at={node.EndTime ?? node.CreationTime} /></td>
                      </tr>
                    ))}
                </tbody>
              </table>
            </div>
          ) : (
            <p className="dim">No node yet.</p>
          )
        }
      </Shown>
    </section>
  )
}
